"""Faults in what models, their parts and other people's weights are made of."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        name="what attention makes in Whisper is not copied",
        file="models/whisper.py",
        right='y = copied(t, y, f"{name}.heads joined")',
        wrong="pass",
    ),
    Fault(
        name="quick GELU is one kernel",
        file="models/clip.py",
        right='if kind != "quick_gelu":',
        wrong="if kind:",
    ),
    Fault(
        name="blocks of a vision tower that nothing reads have a gradient",
        file="models/llava.py",
        right='read = not weight.name.startswith((*unread, f"{TOWER}post_layernorm."))',
        wrong="read = True",
    ),
    Fault(
        name="what a vision tower returns is gone before the loss",
        file="models/llava.py",
        right="        t.returned.append(block(x).storage)",
        wrong="        block(x)",
    ),
    Fault(
        name="the first positions of RoBERTa are for tokens, too",
        file="models/checks.py",
        right="most = model.context - model.position_offset",
        wrong="most = model.context",
    ),
    Fault(
        name="a frozen part is trained",
        file="frozen.py",
        right="replace(w, trainable=False) if",
        wrong="replace(w, trainable=True) if",
    ),
    Fault(
        name="the header of a file of weights may be longer than the file",
        file="hf/safetensors.py",
        right="length > min(size - 8, HEADER_LIMIT)",
        wrong="length > HEADER_LIMIT",
    ),
    Fault(
        name="files of whole numbers count as parameters",
        file="hf/weight_files.py",
        right="floats = [tensor for tensor in tensors if tensor.is_float]",
        wrong="floats = [*tensors]",
    ),
    Fault(
        name="embeddings and head of a known size are layers",
        file="models/size.py",
        right="return 2 * model.vocab * model.hidden",
        wrong="return 0",
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
        name="rotary positions turn all of a head",
        file="models/decoder.py",
        right='return (model.rotary_dim or model.head_width) if model.positions in ("", "rotary") else 0',
        wrong='return model.head_width if model.positions in ("", "rotary") else 0',
    ),
    Fault(
        name="a bias of queries, keys and values is forgotten",
        file="models/decoder_weights.py",
        right='found += _linear(model, f"{name}.{part}", (rows, h), block, "qkv")',
        wrong='found += _linear(model, f"{name}.{part}", (rows, h), block, "")',
    ),
    Fault(
        name="experts are sent no copies",
        file="models/moe.py",
        right="sizes = balanced(plan.tokens * model.top_k, model.experts)",
        wrong="sizes = balanced(plan.tokens, model.experts)",
    ),
    Fault(
        name="experts of other ranks send no rows",
        file="experts.py",
        right='_moved(t, x, f"{name} rows of all ranks", "communication") if t.layout.expert > 1 else x',
        wrong="x",
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
        name="latent attention's keys are not joined in a new tensor",
        file="models/latent.py",
        right='    return t.output(f"{name} joined", shape, dtype, t.node([ops.edge(own), ops.edge(shared)], backward))\n',
        wrong="    return Tensor(own.storage, shape, dtype, t.node([ops.edge(own), ops.edge(shared)], backward))\n",
    ),
    Fault(
        name="what attention makes of queries that lie head by head is not copied",
        file="models/decoder.py",
        right='    if model.head_major and plan.kernel == "flash":\n',
        wrong="    if False:\n",
    ),
    Fault(
        name="a float32 router keeps its input in the model's dtype",
        file="experts.py",
        right='x = t.weights[f"{name}.weight"], cast(t, x, "float32", f"{name} input")\n',
        wrong='x = t.weights[f"{name}.weight"], x\n',
    ),
    Fault(
        name="stacked experts do not keep the products that are weighted",
        file="stacked_experts.py",
        right="    t.save(node, *(z.storage for z, other in ((x, by), (by, x)) if other.node is not None))\n",
        wrong="",
    ),
    Fault(
        name="a fused product of gate and up keeps only the gate's half",
        file="models/decoder.py",
        right="[y.shape[-1] // 2] * 2",
        wrong="[y.shape[-1] // 4] * 2",
    ),
    Fault(
        name="dense blocks of a mixture have experts",
        file="models/moe.py",
        right="    if dense(model, block):\n",
        wrong="    if False:\n",
    ),
    Fault(
        name="a key that is absent is taken for null",
        file="hf/keys.py",
        right="key.names[0], key.default)",
        wrong="key.names[0], None)",
    ),
    Fault(
        name="the file's own head width is overlooked",
        file="hf/common.py",
        right='    if "head_dim" in values["derived"] and',
        wrong='    if "head_dim" in values and',
    ),
    Fault(
        name="a module's weights get no gradients",
        file="models/module.py",
        right="wanted = node.wants(place)",
        wrong="wanted = False",
    ),
]
