"""Faults in tensor, pipeline and context parallelism, and what is sent."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        name="sequence parallel keeps all tokens in Megatron",
        file="tensor_parallel.py",
        right='    gathered = _gathered(t, whole, dtype, f"{name} input")\n',
        wrong='    gathered = _gathered(t, whole, dtype, f"{name} input")\n    t.save(node, gathered)\n',
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
        name="DTensor's gradient of an embedding is of the rank's own rows",
        file="vocab_parallel.py",
        right="parts = 1 if t.reduces_in_place else t.layout.tensor",
        wrong="parts = 1",
    ),
    Fault(
        name="torch's pipeline has one receive buffer for all micro batches",
        file="pipeline.py",
        right='self.plan.accumulation if self.engine.buffers == "all" else 1',
        wrong="1",
    ),
    Fault(
        name="DeepSpeed's pipeline does not copy what it received",
        file="pipeline.py",
        right='            kept.append(self._make("received activations, copied", block))\n',
        wrong="",
    ),
    Fault(
        name="every stage of a stack of layers receives what the first block takes",
        file="step.py",
        right="return found.__getitem__",
        wrong="return lambda block: found[0]",
    ),
    Fault(
        name="each stage holds the running statistics of all layers",
        file="parallel/replicated.py",
        right="if self.plan.layout.pipeline == 1 or name",
        wrong="if True or name",
    ),
    Fault(
        name="of unlike stages only the first between the ends is looked at",
        file="stages.py",
        right="if plan.model.widths:",
        wrong="if False:",
    ),
    Fault(
        name="stage 2 sends gradients once a step",
        file="traffic.py",
        right="per=MICRO_BATCH if stage >= 2 else STEP,",
        wrong="per=STEP,",
    ),
    Fault(
        name="frozen weights have gradients to send",
        file="traffic.py",
        right="return fullest.trainable, fullest.parameters",
        wrong="return fullest.parameters, fullest.parameters",
    ),
    Fault(
        name="hybrid shards travel between machines",
        file="traffic.py",
        right="return max(1, min(size, plan.ranks // plan.nodes // stride))",
        wrong="return 1",
    ),
]
