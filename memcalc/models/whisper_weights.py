"""The weights of Whisper and mBART by name and shape; what they do is in ``memcalc/models/whisper.py``."""

from __future__ import annotations

from dataclasses import replace

from memcalc.spec import HEAD, ROOT, Model, Weight

__all__ = ["weights"]


def weights(model: Model) -> list[Weight]:
    """Of both sides; the head is the token table. Whisper's keys have no bias, and its encoder's positions are sinusoids
    that are not trained. Without an encoder (mBART's decoder alone) nothing reaches the attention to it.

    >>> small = Model(
    ...     name="whisper-small", family="whisper", layers=12, decoder_layers=12, hidden=768, heads=12, ffn=3072,
    ...     vocab=51865, context=448, channels=80, encoder_tokens=1500, tied=True,
    ... )
    >>> sum(weight.numel for weight in weights(small)), sum(weight.numel for weight in weights(small) if weight.trainable)
    (241734912, 240582912)
    """
    h = model.hidden
    found = [Weight("shared.weight", (model.vocab, h))]
    if model.family == "whisper":
        found += [
            Weight("encoder.conv1.weight", (h, model.channels, 3)), Weight("encoder.conv1.bias", (h,)),
            Weight("encoder.conv2.weight", (h, h, 3)), Weight("encoder.conv2.bias", (h,)),
            Weight("encoder.embed_positions.weight", (model.encoder_tokens, h), trainable=False),
        ]  # fmt: skip
    if model.layers:
        found += _side(model, "encoder", model.layers, model.ffn)
    found += _side(model, "decoder", model.decoder_layers, model.decoder_ffn or model.ffn)
    return found if model.tied else [*found, Weight("proj_out.weight", (model.vocab, h), HEAD)]


def _side(model: Model, side: str, layers: int, ffn: int) -> list[Weight]:
    h, found = model.hidden, []
    if side == "decoder" or model.family == "mbart":
        found.append(Weight(f"{side}.embed_positions.weight", (model.context, h)))
    if model.embedding_norm:
        found += _pair(f"{side}.layernorm_embedding", (h,))
    for layer in range(layers):
        block = f"{side}.layers.{layer}"
        for part in ("self_attn", *(["encoder_attn"] if side == "decoder" else [])):
            attends: list[Weight] = []
            for name in "kvq":
                bias = name != "k" or model.family == "mbart"
                attends += _pair(f"{block}.{part}.{name}_proj", (h, h), block, bias=bias)
            attends += _pair(f"{block}.{part}.out_proj", (h, h), block) + _pair(
                f"{block}.{part}_layer_norm", (h,), block
            )
            reached = part == "self_attn" or model.layers
            found += attends if reached else [replace(weight, trainable=False) for weight in attends]
        for name, shape in (("fc1", (ffn, h)), ("fc2", (h, ffn)), ("final_layer_norm", (h,))):
            found += _pair(f"{block}.{name}", shape, block)
    return found if model.norm_after else found + _pair(f"{side}.layer_norm", (h,), ROOT if side == "encoder" else HEAD)


def _pair(name: str, shape: tuple[int, ...], group: str = ROOT, *, bias: bool = True) -> list[Weight]:
    found = [Weight(f"{name}.weight", shape, group)]
    return [*found, Weight(f"{name}.bias", shape[:1], group)] if bias else found
