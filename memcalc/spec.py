"""What a model is made of: numbers (Model) and named weights (Weight). No torch, no formulas."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import prod

from memcalc.errors import PlanError
from memcalc.records import check_types

__all__ = ["HEAD", "ROOT", "Model", "Weight"]

ROOT, HEAD = "root", "head"


@dataclass(frozen=True, slots=True)
class Weight:
    """One trainable tensor, counted once however many modules share it."""

    name: str
    shape: tuple[int, ...]
    group: str = ROOT
    """``root``, ``head`` or the name of the block that owns it; sharding wraps blocks one by one."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The numbers of one architecture; a family says what is built from them.

    Fields a family does not use stay 0. Widths are in elements, ``context`` in tokens.
    """

    name: str
    family: str
    layers: int = 0
    hidden: int = 0
    """Width of the residual stream (of every layer, for an MLP)."""
    heads: int = 0
    kv_heads: int = 0
    """Key/value heads; fewer than ``heads`` means grouped-query attention."""
    head_dim: int = 0
    """Width of one head; 0 where it is hidden / heads."""
    ffn: int = 0
    """Width inside the MLP of a block."""
    experts: int = 0
    """MLPs of a block of which each token takes ``top_k``, in a mixture of experts; ``ffn`` is the width inside one."""
    top_k: int = 0
    shared_ffn: int = 0
    """Width inside an MLP that every token takes besides; 0 where there is none."""
    vocab: int = 0
    context: int = 0
    """Longest sequence the model can take (rows of a position table)."""
    image: int = 0
    """Height and width of an input image in pixels; ``features`` are all its values."""
    channels: int = 0
    """Colours of an input image."""
    patch: int = 0
    """Height and width of the patches an image is cut into."""
    stages: tuple[int, ...] = ()
    """Blocks of each stage of a convolutional network, which halves height and width and doubles channels."""
    bottleneck: bool = False
    """Blocks of three convolutions, the middle one narrower."""
    features: int = 0
    """Elements of one input sample, for models that do not read tokens."""
    classes: int = 0
    """Outputs of a classifier."""
    decoder_layers: int = 0
    """Blocks of a decoder that reads what an encoder of ``layers`` blocks made."""
    buckets: int = 0
    """Rows of a table of biases by distance (T5)."""
    gated: bool = False
    """The MLP multiplies two products of its input."""
    types: int = 0
    """Rows of a token-type table (BERT's segments)."""
    tied: bool = False
    """The output head is the token embedding itself."""
    biases: tuple[str, ...] = ()
    """Which parts have a bias, of ``qkv``, ``out``, ``mlp``, ``head`` and ``norm`` (families llama and decoder)."""
    norm: str = ""
    """``rms`` or ``layer``; blank is ``rms`` (family decoder)."""
    positions: str = ""
    """``rotary``, ``learned`` or ``alibi``, a bias by distance; blank is ``rotary`` (family decoder)."""
    embedding_norm: bool = False
    """The embedding is normalised (BLOOM)."""
    parameters: int = 0
    """Parameter count, for a model known by its size only (family ``size``)."""
    layer_bytes: int = 0
    """Activation bytes one layer keeps for the whole micro batch, where someone stated them (family ``size``)."""

    def __post_init__(self) -> None:
        check_types(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 0:
                raise PlanError(f"model {self.name}: {field.name} {value} must be at least 0")

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden // max(self.heads, 1)

    @property
    def blocks(self) -> int:
        """Repeated parts, which can be checkpointed and sharded one by one."""
        return self.layers + self.decoder_layers + sum(self.stages)
