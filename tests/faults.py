"""Faults to plant into memcalc: each takes one named term away, and some test must fail then."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["FAULTS", "Fault"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One wrong line: ``right`` stands in ``file`` exactly once, and becomes ``wrong``."""

    name: str
    file: str
    right: str
    wrong: str

    def plant(self, root: Path) -> None:
        """Change the file below ``root``."""
        path = root / "memcalc" / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.right) != 1:
            raise SystemExit(
                f"{self.name}: {self.right!r} stands {text.count(self.right)} times in {self.file}, not once"
            )
        path.write_text(text.replace(self.right, self.wrong), encoding="utf-8")


FAULTS = [
    Fault(
        name="the softmax of torch 1.10 does not keep its input",
        file="attention.py",
        right="t.save(node, *([scores.storage] if t.keeps_softmax_input else []))",
        wrong="t.save(node)",
    ),
    Fault(
        name="a linear layer does not keep its input",
        file="ops.py",
        right="t.save(node, *([factor.storage] if to_weight is not None else []), ",
        wrong="t.save(node, ",
    ),
    Fault(
        name="a frozen linear layer keeps its input",
        file="ops.py",
        right="[factor.storage] if to_weight is not None else []",
        wrong="[factor.storage]",
    ),
    Fault(
        name="frozen weights get gradients",
        file="autograd.py",
        right="edges = [None if isinstance(edge, Weight) and not edge.trainable else edge for edge in edges]\n",
        wrong="edges = list(edges)\n",
    ),
    Fault(
        name="a compiled checkpoint keeps what no backward reads",
        file="tape.py",
        right="                self._region.drop_unread()\n",
        wrong="                pass\n",
    ),
    Fault(
        name="what a pipeline's engine holds on to piles up from step to step",
        file="reserved.py",
        right="if not first and delta > 0 and ident in replaced:",
        wrong="if False:",
    ),
    Fault(
        name="embeddings and head of a known size are layers",
        file="models/size.py",
        right="return 2 * model.vocab * model.hidden",
        wrong="return 0",
    ),
    Fault(
        name="the head is gathered with the root",
        file="ledger.py",
        right="runs, plan.fsdp.separate_root)",
        wrong="runs, False)",
    ),
    Fault(
        name="LoRA's factors have states like the weights'",
        file="parallel/replicated.py",
        right="weight.group), self.trained_dtype)",
        wrong="weight.group), self.dtype)",
    ),
    Fault(
        name="a quantised weight is not unpacked",
        file="adapted.py",
        right='"temporary", batched=False)\n        del scales',
        wrong='"temporary", batched=False) if False else None\n        del scales',
    ),
    Fault(
        name="quantised scales are free",
        file="quantised.py",
        right='("scales", 4 * -(-numel // _BLOCK)), ',
        wrong='("scales", 0), ',
    ),
    Fault(
        name="every matrix product is kept by a selective checkpoint",
        file="checkpointing.py",
        right="count % 2 == 1",
        wrong="count > 0",
    ),
    Fault(
        name="LayerNorm keeps no mean",
        file="norms.py",
        right='for part in ("mean", "rstd")',
        wrong='for part in ("rstd",)',
    ),
    Fault(
        name="a norm in Python keeps no float32 copy",
        file="norms.py",
        right='    x = cast(t, x, "float32", f"{name} input")\n    node = t.node([edge(x)], statistics_backward)\n',
        wrong="    node = t.node([edge(x)], statistics_backward)\n",
    ),
    Fault(
        name="GELU in Python keeps no tanh",
        file="ops.py",
        right='    inner = relu(t, inner, f"{name} tanh")\n',
        wrong="",
    ),
    Fault(
        name="SwiGLU's kernel keeps only one factor",
        file="ops.py",
        right="    t.save(node, gate.storage, up.storage)\n",
        wrong="    t.save(node, gate.storage, gate.storage)\n",
    ),
    Fault(
        name="keys and values are not repeated when asked",
        file="attention.py",
        right='if k.shape[-1] != q.shape[-1] and (repeat or kind != "flash"):',
        wrong='if k.shape[-1] != q.shape[-1] and kind != "flash":',
    ),
    Fault(
        name="capped scores keep no tanh",
        file="ops.py",
        right='return scale(t, relu(t, scale(t, x, f"{name} share"), f"{name} tanh"), f"{name} times cap")',
        wrong='return scale(t, scale(t, x, f"{name} share"), f"{name} times cap")',
    ),
    Fault(
        name="rotary positions turn all of a head",
        file="models/decoder.py",
        right='return (model.rotary_dim or model.head_width) if model.positions in ("", "rotary") else 0',
        wrong='return model.head_width if model.positions in ("", "rotary") else 0',
    ),
    Fault(
        name="TorchScript's softmax keeps nothing of its input",
        file="softmaxes.py",
        right="t.save(node, masked, shares.storage)",
        wrong="t.save(node, shares.storage)",
    ),
    Fault(
        name="OPT's maximum of scores keeps nothing",
        file="softmaxes.py",
        right="t.save(node, scores.storage)",
        wrong="pass",
    ),
    Fault(
        name="a bias of queries, keys and values is forgotten",
        file="models/decoder_weights.py",
        right='found += _linear(model, f"{name}.{part}", (rows, h), block, "qkv")',
        wrong='found += _linear(model, f"{name}.{part}", (rows, h), block, "")',
    ),
    Fault(
        name="pooling keeps no indices",
        file="convolution.py",
        right='t.save(node, t.allocate(f"{name} indices", pooled, "int64", "activations"))',
        wrong='t.allocate(f"{name} indices", pooled, "int64", "activations")',
    ),
    Fault(
        name="batch norm does not keep its input",
        file="convolution.py",
        right="    node = t.node([edge(x), w, bias], backward)\n    t.save(node, x.storage)\n",
        wrong="    node = t.node([edge(x), w, bias], backward)\n",
    ),
    Fault(
        name="experts are sent no copies",
        file="models/moe.py",
        right="sizes = balanced(plan.tokens * model.top_k, model.experts)",
        wrong="sizes = balanced(plan.tokens, model.experts)",
    ),
    Fault(
        name="T5's softmax is in 16 bit",
        file="attention.py",
        right='_softmax(t, cast(t, scores, "float32", f"{name} scores"), name), low',
        wrong="_softmax(t, scores, name), low",
    ),
    Fault(
        name="a shared weight's gradient is handed over for each use",
        file="autograd.py",
        right="        if self._uses[weight.name]:\n            parts.append(grad)\n            return\n",
        wrong="",
    ),
    Fault(
        name="sequence parallel keeps all tokens in Megatron",
        file="tensor_parallel.py",
        right='    gathered = _gathered(t, whole, dtype, f"{name} input")\n',
        wrong='    gathered = _gathered(t, whole, dtype, f"{name} input")\n    t.save(node, gathered)\n',
    ),
    Fault(
        name="experts of other ranks send no rows",
        file="experts.py",
        right='_moved(t, x, f"{name} rows of all ranks", "communication") if t.layout.expert > 1 else x',
        wrong="x",
    ),
    Fault(
        name="tensor parallel does not divide the MLP",
        file="tensor_parallel.py",
        right="        ffn=model.ffn // degree,\n",
        wrong="",
    ),
    Fault(
        name="tensor parallel does not divide the vocabulary",
        file="tensor_parallel.py",
        right="        vocab=share(model.vocab, degree),\n",
        wrong="",
    ),
    Fault(
        name="a rank of context parallel sees all tokens",
        file="tensor_parallel.py",
        right="tokens=share(plan.tokens, layout.context)",
        wrong="tokens=plan.tokens",
    ),
    Fault(
        name="Megatron's loss has no float32 softmax",
        file="vocab_parallel.py",
        right='softmax = t.allocate("softmax of the logits", shape, "float32", "activations")',
        wrong='softmax = t.allocate("softmax of the logits", (0,), "float32", "activations")',
    ),
    Fault(
        name="Megatron's dropout keeps no mask",
        file="megatron.py",
        right='t.save(node, t.allocate(f"{name} mask", shape, "bool", "activations"))',
        wrong="pass",
    ),
    Fault(
        name="Megatron's GELU does not keep its input",
        file="megatron.py",
        right='    """GELU of ``x + bias`` in one kernel, which keeps its input; both gradients are one tensor, summed for the bias."""\n    shape, dtype = x.shape, x.dtype\n',
        wrong='    """GELU."""\n    return t.output("gone", x.shape, x.dtype, t.node([edge(x)], lambda node, grads: grads))\n    shape, dtype = x.shape, x.dtype\n',
    ),
    Fault(
        name="loss parallel holds no temporaries",
        file="vocab_parallel.py",
        right='        exponential = t.allocate("exponential of the log-softmax", shape, dtype, "temporary")\n        total = t.allocate("sum of both", shape, dtype, "temporary")\n',
        wrong="        exponential = total = None\n",
    ),
    Fault(
        name="ring attention gathers no keys and values",
        file="context_parallel.py",
        right="whole = (both[0] * t.layout.context, both[1])",
        wrong="whole = (0, both[1])",
    ),
    Fault(
        name="Transformer Engine has no workspace",
        file="models/megatron.py",
        right='return [("Transformer Engine\'s workspace", (size,), "uint8")]',
        wrong="return []",
    ),
    Fault(
        name="Megatron's core makes its scores anew",
        file="models/megatron.py",
        right='return [t.allocate("scores made before", shape, t.weight_dtype, "buffers")]',
        wrong="return []",
    ),
    Fault(
        name="the core's masks are no part of a batch",
        file="models/megatron.py",
        right='return [t.allocate("attention mask", (plan.tokens, plan.tokens), "bool", "inputs")]',
        wrong="return []",
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
        name="pinned memory is not rounded",
        file="host.py",
        right="    return 1 << (size - 1).bit_length() if size else 0",
        wrong="    return size",
    ),
    Fault(
        name="FSDP 1 makes a second copy",
        file="parallel/flat_shard.py",
        right='        self.gloo_copy(f"{unit} gather", size, low)\n        del cast',
        wrong='        self.gloo_copy(f"{unit} gather", size, low)\n        self.held.append(self.flat(f"{unit} copy", size, low))\n        del cast',
    ),
    Fault(
        name="replicas divide like shards",
        file="plan.py",
        right="        return self.data_parallel * self.layout.context // self.fsdp.groups(self)",
        wrong="        return self.data_parallel * self.layout.context",
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
        name="Adam has one moment",
        file="optimizers/of_torch.py",
        right='library="torch.optim.AdamW",\n    states=copies(2),',
        wrong='library="torch.optim.AdamW",\n    states=copies(1),',
    ),
    Fault(
        name="the foreach temporary is lost",
        file="optimizers/of_torch.py",
        right='"foreach": since((2, 1), lists(_ROOT), lists(_ROOT, "denominator")),',
        wrong='"foreach": since((2, 1), nothing, lists(_ROOT, "denominator")),',
    ),
    Fault(
        name="sharded gradients lie on the computation's stream",
        file="streams.py",
        right='" gather": 1, " shards gradient": 2',
        wrong='" gather": 1, " shards gradient": 0',
    ),
    Fault(
        name="states are made in the first step even of a resumed run",
        file="reserved.py",
        right='lazy = plan.startup.resume == "none" and not plan.strategy_row.masters',
        wrong="lazy = True",
    ),
    Fault(
        name="kept gradients are made with the model",
        file="reserved.py",
        right="found[ident] = kept.pop(name)[0]",
        wrong="kept.pop(name)",
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
        name="index_copy keeps nothing",
        file="adapted.py",
        right="t.save(node, source)",
        wrong="del node.saved[:]",
    ),
    Fault(
        name="fused LoRA keeps the input of an MLP's last layer",
        file="adapted.py",
        right='if adapter.fused and name.rsplit(".", 1)[-1] == "down_proj":',
        wrong="if False:",
    ),
    Fault(
        name="all that has no adapter is frozen in DeepSpeed-Chat, too",
        file="adapters.py",
        right="trainable=norm or rest",
        wrong="trainable=norm",
    ),
    Fault(
        name="a block that waits for a stream counts as allocated",
        file="replay.py",
        right="waiting += live[ident].size",
        wrong="waiting += 0",
    ),
    Fault(
        name="a gather of FSDP 1 is free at once",
        file="streams.py",
        right="waiting[ending].append(event)",
        wrong="found.append(event)",
    ),
    Fault(
        name="reserved knows no card",
        file="estimate.py",
        right="capacity=capacity, free=held)",
        wrong="capacity=None, free=held)",
    ),
    Fault(
        name="all groups of ranks have one communicator",
        file="outside.py",
        right="len(communicators(plan))",
        wrong="min(len(communicators(plan)), 1)",
    ),
    Fault(
        name="kernels are loaded when used in every torch",
        file="outside.py",
        right="if plan.torch_version < LAZY_SINCE and",
        wrong="if not plan.torch_version and",
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
        name="a recorded segment's address is ignored",
        file="allocator_history.py",
        right='entry.address if own and action == "segment_alloc" else None',
        wrong="None",
    ),
    Fault(
        name="a fused loss keeps no logits",
        file="cross_entropy.py",
        right="t.save(node, logits.storage, targets.storage, *(each",
        wrong="t.save(node, targets.storage, *(each",
    ),
    Fault(
        name="gradients of chunks are not joined",
        file="cross_entropy.py",
        right='return [t.allocate(f"{name} gradient of all chunks", shape, dtype, "temporary")]',
        wrong="return grads[:1]",
    ),
    Fault(
        name="a fused linear loss makes no weight gradient in forward",
        file="cross_entropy.py",
        right="t.save(node, *made)",
        wrong='t.save(node, made[0], *(t.allocate(p.name, (0,), low, "gradients", batched=False) for p in (w, bias) if p))',
    ),
    Fault(
        name="shifted logits are no copy",
        file="cross_entropy.py",
        right='return t.output("logits shifted", (max(shape[0] - 1, 1), *shape[1:]), dtype, node)',
        wrong="return Tensor(logits.storage, (max(shape[0] - 1, 1), *shape[1:]), dtype, node)",
    ),
    Fault(
        name="scales of 8-bit moments are lost",
        file="optimizers/of_libraries.py",
        right="return [count] * moments + [4 * -(-count // 256)] * moments",
        wrong="return [count] * moments",
    ),
    Fault(
        name="Muon's matrices have Adam's moments",
        file="optimizers/row.py",
        right="return self if self.rest is None or hidden else self.rest",
        wrong="return self if self.rest is None else self.rest",
    ),
    Fault(
        name="paged states are on the device",
        file="optimizers/row.py",
        right="return bool(self.paged_from) and weight.numel >= self.paged_from",
        wrong="return False",
    ),
    Fault(
        name="decay of gradients is in place",
        file="optimizers/row.py",
        right='if not l2 or kind == "fused":',
        wrong="if True:",
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
        name="8-bit factors take nothing",
        file="ops.py",
        right='if t.float8 == "none" or "." not in weight.group:',
        wrong="if True:",
    ),
    Fault(
        name="offloaded activations stay on the device",
        file="autograd.py",
        right='if storage is None or not self.offloads or self.moment != "forward":',
        wrong="if True:",
    ),
    Fault(
        name="offloaded activations come back for nothing",
        file="recorder.py",
        right='        return self.copy_of(storage, f"{self._names[storage.ident]}, back from the host", "activations")',
        wrong="        return storage",
    ),
    Fault(
        name="GiB is taken for GB",
        file="units.py",
        right='"GB": 10**9',
        wrong='"GB": 2**30',
    ),
    Fault(
        name="1F1B runs one forward pass fewer ahead",
        file="schedules.py",
        right="behind = stages - stage - 1",
        wrong="behind = max(stages - stage - 2, 0)",
    ),
    Fault(
        name="interleaved stages run ahead as if they had one stretch",
        file="schedules.py",
        right="2 * behind + (chunks - 1) * stages",
        wrong="2 * behind",
    ),
    Fault(
        name="GPipe's middle micro batches are not counted",
        file="ledger.py",
        right="tape.repeat(since, plan.accumulation - rounds + 1)",
        wrong="tape.repeat(since, 1)",
    ),
    Fault(
        name="a tied head has no copy of the token table",
        file="stages.py",
        right="not (part.last and tied)",
        wrong="True or not (part.last and tied)",
    ),
    Fault(
        name="embedding and head do not count as layers",
        file="stages.py",
        right="        sizes[0] -= 1\n        sizes[-1] -= 1\n",
        wrong="        sizes[-1] -= 2\n",
    ),
    Fault(
        name="torch's last stage drops its logits before their backward",
        file="pipeline.py",
        right="            kept.append(output.storage)\n            if self.plan.layout.schedule",
        wrong="            if self.plan.layout.schedule",
    ),
    Fault(
        name="gloo lets go of what was sent",
        file="pipeline.py",
        right='if gloo and (schedule == "gpipe" or self.sent == warm_up - 2):',
        wrong="if False:",
    ),
    Fault(
        name="a pipeline lets go of each gradient that was sent",
        file="pipeline.py",
        right='return self.engine.works and self.plan.layout.schedule != "1f1b"',
        wrong="return False",
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
        name="DTensor's gradient of an embedding is of the rank's own rows",
        file="vocab_parallel.py",
        right="parts = 1 if t.reduces_in_place else t.layout.tensor",
        wrong="parts = 1",
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
        name="torch's pipeline has one receive buffer for all micro batches",
        file="pipeline.py",
        right='self.plan.accumulation if self.engine.buffers == "all" else 0',
        wrong="0",
    ),
    Fault(
        name="DeepSpeed's pipeline does not copy what it received",
        file="pipeline.py",
        right='            kept.append(self._make("received activations, copied", self.shape))\n',
        wrong="",
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
        name="FSDP leaves images in float32",
        file="ledger.py",
        right='self.plan.strategy_row.gathers and plan.family.reads != "tokens"',
        wrong='self.plan.strategy_row.gathers and plan.family.reads == "features"',
    ),
    Fault(
        name="a gather is gone before the next is copied out",
        file="parallel/fully_shard.py",
        right="        self._copy_out(unit)\n        self.last_gather = self.gathered",
        wrong="        self.last_gather = None\n        self._copy_out(unit)\n        self.last_gather = self.gathered",
    ),
    Fault(
        name="a rehearsal on fake tensors has no workspaces",
        file="rehearsal.py",
        right='if device == "fake" and (kept := workspaces(plan)):',
        wrong='if device == "none" and (kept := workspaces(plan)):',
    ),
    Fault(
        name="a plan that its rehearsal refuses is taken",
        file="confirmation.py",
        right="return self.needed <= self.limit",
        wrong="return self.needed > 0",
    ),
    Fault(
        name="what a ring lost is not found in the segments",
        file="snapshot_timeline.py",
        right="for entry, frames in _older(snapshot, set(final)):",
        wrong="for entry, frames in _older(snapshot, set(final))[:0]:",
    ),
    Fault(
        name="what outlives backward is no gradient",
        file="snapshot_timeline.py",
        right="name = source.passing if passing else source.lasting",
        wrong="name = source.passing",
    ),
    Fault(
        name="a pickle's keys may be anything",
        file="plain_pickle.py",
        right="if not all(type(key) is str for key in keys):",
        wrong="if False:",
    ),
    Fault(
        name="stage 2 sends gradients once a step",
        file="traffic.py",
        right="times = plan.accumulation if stage >= 2 else 1",
        wrong="times = 1",
    ),
    Fault(
        name="frozen weights have gradients to send",
        file="traffic.py",
        right="return sum(w.numel for w in weights if w.trainable), sum(",
        wrong="return sum(w.numel for w in weights), sum(",
    ),
    Fault(
        name="hybrid shards travel between machines",
        file="traffic.py",
        right="inside = copies > 1 and plan.shards <= plan.ranks // plan.nodes",
        wrong="inside = False",
    ),
    Fault(
        name="an unknown key of a launch file is passed over",
        file="configs/keys.py",
        right='    raise FileError(f"{name}: unknown key {shorten(path)}{hint}")',
        wrong='    return f"{name}: unknown key {shorten(path)}{hint}"',
    ),
    Fault(
        name="a batch that is no product is taken",
        file="configs/batch.py",
        right="        if train != micro * rounds * ranks:",
        wrong="        if False:",
    ),
    Fault(
        name="parameters are offloaded where DeepSpeed does not",
        file="configs/deepspeed_json.py",
        right='        if places[part] != "none" and stage < least:',
        wrong="        if False:",
    ),
    Fault(
        name="a launch file is written that says another plan",
        file="configs/write.py",
        right="        if again[name] != value:",
        wrong="        if False:",
    ),
]
