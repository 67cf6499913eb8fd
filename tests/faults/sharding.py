"""Faults in how parameters, gradients and states are divided over ranks, and what that allocates."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        name="a static graph holds what any graph does",
        file="parallel/ddp.py",
        right="if self.plan.static_graph:",
        wrong="if False:",
    ),
    Fault(
        name="DDP keeps the gradient of the whole table that tensor parallel divides",
        file="parallel/ddp.py",
        right="self.plan.layout.tensor > 1",
        wrong="False",
    ),
    Fault(
        name="LoRA's factors have states like the weights'",
        file="parallel/replicated.py",
        right="weight.group), self.trained_dtype)",
        wrong="weight.group), self.dtype)",
    ),
    Fault(
        name="rows are divided rounding down",
        file="sharding.py",
        right="return (-(-shape[0] // ranks), *shape[1:])",
        wrong="return (max(shape[0] // ranks, 1), *shape[1:])",
    ),
    Fault(
        name="the last, unfilled bucket is missing",
        file="sharding.py",
        right="return [*buckets, size] if size else buckets",
        wrong="return buckets",
    ),
    Fault(
        name="the emptiest rank stands for the fullest",
        file="sharding.py",
        right="return max(range(len(parts))",
        wrong="return min(range(len(parts))",
    ),
    Fault(
        name="full and grad-op sharding are swapped",
        file="parallel/fully_shard.py",
        right="if self.plan.strategy_row.reshards and unit != HEAD:",
        wrong="if not self.plan.strategy_row.reshards and unit != HEAD:",
    ),
    Fault(
        name="ZeRO's buffer is not padded to its ranks",
        file="sharding.py",
        right="    return -(-numel // (2 * ranks)) * 2",
        wrong="    return -(-numel // ranks)",
    ),
    Fault(
        name="ZeRO keeps no float32 masters",
        file="parallel/zero.py",
        right='            self.hold(flat.name, flat.shape, "optimizer", "float32")\n            # The states',
        wrong="            # The states",
    ),
    Fault(
        name="ZeRO's reduce bucket is missing",
        file="parallel/zero.py",
        right="        for index in range(1 + self.overlaps):",
        wrong="        for index in range(0):",
    ),
    Fault(
        name="ZeRO's step makes no float32 gradient",
        file="parallel/zero.py",
        right='            gradient = self.temporary("float32 gradient", self.partition, "float32", "gradients")',
        wrong="            gradient = flat",
    ),
    Fault(
        name="ZeRO-1 lets gradients go before they are reduced",
        file="parallel/zero.py",
        right="            self.grads.setdefault(weight.name, self.accumulated(weight, grad))",
        wrong='            self.grads.setdefault(weight.name, self.tape.allocate("", (0,), "uint8", "gradients"))',
    ),
    Fault(
        name="the flat copy of ZeRO's weights is free",
        file="parallel/zero.py",
        right='        if self.knobs.flatten == "host":',
        wrong='        if self.knobs.flatten != "":',
    ),
    Fault(
        name="BF16_Optimizer keeps no float32 gradients",
        file="parallel/zero_bf16.py",
        right='        self.hold("float32 gradients", (self.partition * self.plan.shards,), "gradients", "float32")\n',
        wrong="",
    ),
    Fault(
        name="stage 0 flattens no float32 gradients",
        file="parallel/zero_0.py",
        right='            flat = self.temporary("flat float32 gradient", self.numel, "float32", "gradients")',
        wrong="            flat = None",
    ),
    Fault(
        name="stage 3 gathers without a limit",
        file="parallel/fetching.py",
        right="        room = min(self.knobs.max_live_parameters - self.live, self.knobs.prefetch_bucket_size)",
        wrong="        room = 10**18",
    ),
    Fault(
        name="stage 3 keeps no small weights gathered",
        file="parallel/zero_3.py",
        right="            if weight.numel <= self.knobs.persistence_threshold:",
        wrong="            if False:",
    ),
    Fault(
        name="stage 3 updates all groups at once",
        file="sharding.py",
        right="        if size >= limit:\n            groups.append(size)\n            size = 0\n    return [*groups, size] if size else groups",
        wrong="    return [size]",
    ),
    Fault(
        name="FSDP 1 makes a second copy",
        file="parallel/flat_shard.py",
        right='        self.gloo_copy(f"{unit} gather", size, low)\n        del cast',
        wrong='        self.gloo_copy(f"{unit} gather", size, low)\n        self.held.append(self.flat(f"{unit} copy", size, low))\n        del cast',
    ),
    Fault(
        name="HSDP drops what is all-reduced",
        file="parallel/fully_shard.py",
        right="                self.replicated.append(reduced)",
        wrong="                pass",
    ),
    Fault(
        name="offloaded gradients go one by one under FSDP 1",
        file="parallel/flat_shard.py",
        right="        self.grads.setdefault(unit, shard)\n",
        wrong="        if not self.away:\n            self.grads.setdefault(unit, shard)\n",
    ),
    Fault(
        name="DataParallel gathers no outputs",
        file="parallel/data_parallel.py",
        right="        if self.plan.ranks == 1:\n            return output",
        wrong="        return output",
    ),
    Fault(
        name="inputs of reentrant checkpoints go although FSDP 1 has hooks on them",
        file="parallel/flat_adapters.py",
        right="self.tape.entries = self.entries",
        wrong="self.tape.entries = None",
    ),
    Fault(
        name="frozen units of FSDP 1 get gradients",
        file="parallel/flat_shard.py",
        right="if not self.trains(unit):",
        wrong="if False:",
    ),
    Fault(
        name="no model is built whole",
        file="parallel/before.py",
        right='if plan.startup.build != "whole" or',
        wrong="if plan.startup or",
    ),
    Fault(
        name="load_state_dict never copied states",
        file="parallel/before.py",
        right="if plan.torch_version < COPIES_STATES_UNTIL else",
        wrong="if not plan.torch_version else",
    ),
    Fault(
        name="no average of weights",
        file="parallel/replicated.py",
        right='if self.plan.update.ema != "none":',
        wrong="if False:",
    ),
    Fault(
        name="gradients updated in backward are kept",
        file="parallel/replicated.py",
        right="        self.grads.pop(name, None)\n",
        wrong="",
    ),
    Fault(
        name="clipping takes no norms",
        file="parallel/replicated.py",
        right='held += [self.tape.allocate("norm", (), "float32", "temporary", batched=False) for _ in shapes]',
        wrong="held += []",
    ),
    Fault(
        name="torch's pipeline has one micro batch on the device",
        file="engines.py",
        right="            whole_batch=True,\n",
        wrong="",
    ),
    Fault(
        name="FSDP in a pipeline divides again after each backward",
        file="parallel/fully_shard.py",
        right="self.late = plan.layout.pipeline > 1",
        wrong="self.late = False",
    ),
    Fault(
        name="ZeRO-3 updates float32 weights in place",
        file="parallel/zero_3.py",
        right='                self.hold(flat.name, flat.shape, "optimizer", "float32")\n',
        wrong='                _ = cast is not None and self.hold(flat.name, flat.shape, "optimizer", "float32")\n',
    ),
    Fault(
        name="on the CPU what DeepSpeed offloads is gone",
        file="parallel/replicated.py",
        right='if self.plan.device == "cpu" and self.plan.strategy_row.zero_stage:',
        wrong="if False:",
    ),
    Fault(
        name="DeepSpeed's last stage keeps none of its outputs",
        file="engines.py",
        right="keeps_logits=2,",
        wrong="keeps_logits=0,",
    ),
    Fault(
        name="Megatron's gradients are in bfloat16",
        file="parallel/megatron.py",
        right='"float16" if self.dtype == "float16" else "float32"',
        wrong="self.dtype",
    ),
    Fault(
        name="Megatron's float16 gradients are not copied for the step",
        file="parallel/megatron.py",
        right='if self.gradient_dtype != "float32":',
        wrong="if False:",
    ),
    Fault(
        name="the distributed optimizer divides nothing",
        file="parallel/megatron.py",
        right="if rank == 0]",
        wrong="if rank >= 0]",
    ),
    Fault(
        name="a gather is gone before the next is copied out",
        file="parallel/fully_shard.py",
        right="        self._copy_out(unit)\n        self.last_gather = self.gathered",
        wrong="        self.last_gather = None\n        self._copy_out(unit)\n        self.last_gather = self.gathered",
    ),
    Fault(
        name="states and DeepSpeed's flat buffers go by units, not in the model's order",
        file="parallel/replicated.py",
        right="    return sorted(weights, key=lambda weight: place.get(weight.name, len(place)))",
        wrong="    return [weight for weight in weights if weight.name in place]",
    ),
    Fault(
        name="gradients that the next step frees are kept for good",
        file="reserved.py",
        right="if ident in gradients and ident not in freed",
        wrong="if ident in gradients",
    ),
    Fault(
        name="a shard's cast copy is of one weight only",
        file="parallel/fully_shard.py",
        right="sum(counts.values()), self.low))",
        wrong="max(counts.values()), self.low))",
    ),
    Fault(
        name="an update on the host has no counter",
        file="parallel/zero_3.py",
        right='return len(self.groups) if self.offload.optimizer != "none" else 0',
        wrong="return 0",
    ),
]
