"""Faults in what one step on one device computes and keeps."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        name="the decoder attends to as many positions of the encoder as it has tokens",
        file="attention.py",
        right="    return heads, q.shape[0], k.shape[0]",
        wrong="    return heads, q.shape[0], q.shape[0]",
    ),
    Fault(
        name="a norm in Python keeps what only a trained weight needs",
        file="norms.py",
        right="    node = t.node([w, edge(x)], backward)\n    t.save(node, x.storage if w.trainable else None)",
        wrong="    node = t.node([w, edge(x)], backward)\n    t.save(node, x.storage)",
    ),
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
        name="the head is gathered with the root",
        file="step.py",
        right="runs, plan.fsdp.separate_root)",
        wrong="runs, False)",
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
        right='if k.shape[-1] != q.shape[-1] and (repeat or masked or kind != "flash"):',
        wrong='if k.shape[-1] != q.shape[-1] and (masked or kind != "flash"):',
    ),
    Fault(
        name="capped scores keep no tanh",
        file="ops.py",
        right='return scale(t, relu(t, scale(t, x, f"{name} share"), f"{name} tanh"), f"{name} times cap")',
        wrong='return scale(t, scale(t, x, f"{name} share"), f"{name} times cap")',
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
        name="sharded gradients lie on the computation's stream",
        file="streams.py",
        right='" gather": 1, " shards gradient": 2',
        wrong='" gather": 1, " shards gradient": 0',
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
        name="GPipe's middle micro batches are not counted",
        file="step.py",
        right="tape.repeat(since, plan.accumulation - rounds + 1)",
        wrong="tape.repeat(since, 1)",
    ),
    Fault(
        name="values narrower than keys make outputs as wide as queries",
        file="fused_attention.py",
        right="q.shape[-1] * v.shape[-1] // k.shape[-1])",
        wrong="q.shape[-1])",
    ),
    Fault(
        name="FSDP leaves images in float32",
        file="step.py",
        right='self.plan.strategy_row.gathers and plan.family.reads != "tokens"',
        wrong='self.plan.strategy_row.gathers and plan.family.reads == "features"',
    ),
    Fault(
        name="a T4 has flash attention",
        file="kernels.py",
        right="it.cuda and it.capability < _AMPERE,",
        wrong="it.cuda and it.capability < (7, 0),",
    ),
    Fault(
        name="every card multiplies bfloat16 in the efficient kernel",
        file="kernels.py",
        right='it.dtype == "bfloat16" and it.capability < _AMPERE',
        wrong='it.dtype == "bfloat16" and it.capability < (5, 0)',
    ),
    Fault(
        name="grouped keys have their gradients made at once",
        file="fused_attention.py",
        right="    grouped = k.shape[-1] < width\n",
        wrong="    grouped = False\n",
    ),
    Fault(
        name="a sequence as long as its window has no mask",
        file="plan.py",
        right="return 0 < self.model.window <= self.tokens and",
        wrong="return 0 < self.model.window < self.tokens and",
    ),
]
