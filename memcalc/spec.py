"""What a model is made of: numbers (Model) and named weights (Weight). No torch, no formulas."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import prod

from memcalc.errors import PlanError
from memcalc.records import check_types

__all__ = ["HEAD", "ROOT", "Model", "Module", "Weight"]

ROOT, HEAD = "root", "head"


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter tensor, counted once however many modules share it."""

    name: str
    shape: tuple[int, ...]
    group: str = ROOT
    """``root``, ``head`` or the name of the block that owns it; sharding wraps blocks one by one."""
    trainable: bool = True
    """A frozen weight gets no gradient and has no optimizer state."""
    dtype: str = ""
    """Its own dtype; blank is that of the precision's weights."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """An ``nn.Module`` of the user's own: where its code is, and what was counted when it was built."""

    factory: str = ""
    """The callable that returns it, ``package.file:name`` or ``path/file.py:name``; blank in other families."""
    sample: str = ""
    """A callable that is given a number of samples and returns a batch; blank where inputs have a shape instead."""
    wrap: str = ""
    """The class whose modules are units of sharding and checkpoints; blank where they were found."""
    shape: tuple[int, ...] = ()
    """Of one sample, for a module that reads numbers."""
    arguments: tuple[str, ...] = ()
    """Names under which it is called with inputs and targets; none where inputs come first and alone."""
    loss: str = ""
    """``own``, or what is made of its output: ``cross-entropy`` or ``mean-square``; blank where no forward pass was seen."""
    weights: tuple[Weight, ...] = ()
    buffers: tuple[Weight, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)


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
    routed: int = 0
    """Experts a token may take in all, where this model is a rank's part with ``experts`` of them."""
    top_k: int = 0
    shared_ffn: int = 0
    """Width inside an MLP that every token takes besides; 0 where there is none."""
    shared_gate: bool = False
    """What that MLP says is multiplied by a number of its own for each token (Qwen 2 MoE)."""
    dense_layers: tuple[int, ...] = ()
    """Blocks, counted from 0, that have one MLP of width ``dense_ffn`` in the place of experts."""
    dense_ffn: int = 0
    stacked: bool = False
    """Experts of a block are slices of two tensors, gate and up in one of them (transformers from 5 on)."""
    wide_router: bool = False
    """The router multiplies in float32, whatever the model's dtype."""
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
    widths: tuple[int, ...] = ()
    """Width of each layer of an MLP, where they differ."""
    batch_norm: bool = False
    """Each layer of an MLP is normalised over the batch."""
    features: int = 0
    """Elements of one input sample, for models that do not read tokens."""
    position_offset: int = 0
    """Rows of the position table that no token takes; they come first (RoBERTa)."""
    classes: int = 0
    """Outputs of a classifier; a BERT that has any says one class a sequence instead of masked words."""
    head: str = ""
    """What a BERT or ViT ends in, where not in words or one class: ``pretraining`` (words, and whether the next sentence
    follows), ``tokens`` (a class of each token), ``spans`` (scores of a beginning and an end), ``replaced`` (which tokens
    are not the text's), ``pooled`` or ``bare`` (nothing but the pooled first place, or the place itself)."""
    decoder_layers: int = 0
    """Blocks of a decoder that reads what an encoder of ``layers`` blocks made."""
    decoder_heads: int = 0
    """Heads of the decoder's attention, where they are not the encoder's; its MLPs are ``decoder_ffn`` wide."""
    decoder_ffn: int = 0
    encoder_tokens: int = 0
    """Positions of an encoder that reads frames of sound, two frames each (Whisper)."""
    decoder_tokens: int = 0
    """Tokens of the decoder's sequence, where it is not as long as the encoder's."""
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
    fused_qkv: bool = False
    """Query, key and value are one product."""
    separate_qkv: bool = False
    """Query, key and value are three products (a ViT as transformers has it; timm's and torchvision's are one)."""
    fused_gate_up: bool = False
    """Both products of a gated MLP's input are one (Phi 3)."""
    qk_norm: bool = False
    """Each head's query and key are normalised."""
    q_lora: int = 0
    """Width that queries are made through (latent attention); 0 where they are one product of the stream."""
    kv_lora: int = 0
    """Width that keys and values are made through (DeepSeek's latent attention, which rotates ``rotary_dim`` of a head's
    width in a key that all heads share); 0 where attention has keys and values of its own."""
    value_dim: int = 0
    """Width of one head's value, in latent attention."""
    norm: str = ""
    """``rms`` or ``layer``; blank is ``rms`` (family decoder)."""
    activation: str = ""
    """What an MLP applies, such as ``gelu``; blank is the family's own: ``silu``, or ``relu`` of the family mlp."""
    positions: str = ""
    """``rotary``, ``learned`` or ``alibi``, a bias by distance; blank is ``rotary`` (family decoder)."""
    rotary_dim: int = 0
    """How much of a head's width is rotated; 0 is all of it."""
    head_major: bool = False
    """Rotated queries lie head by head in memory, and so does what flash attention makes of them, which is copied."""
    side_by_side: int = 0
    """Norms of a block whose attention and MLP both read its input, 1 or 2; 0 where they follow each other."""
    post_norm: bool = False
    """What attention and MLP make is normalised, too (Gemma 2)."""
    norm_after: bool = False
    """The stream is normalised after attention and MLP are added, and not at the end (OPT 350M)."""
    embedding_norm: bool = False
    """The embedding is normalised (BLOOM)."""
    embedding_dim: int = 0
    """Width of the token table, which a product brings to ``hidden`` and another one back (OPT 350M); 0 is ``hidden``."""
    scaled: tuple[str, ...] = ()
    """Which are multiplied by a number, of ``embedding``, ``residual`` and ``logits``."""
    capped: tuple[str, ...] = ()
    """Which scores go through tanh, of ``attention`` and ``logits``."""
    vision: Model | None = None
    """The vision tower beside a text model, whose numbers the other fields say (family llava)."""
    vision_layers: int = 0
    """Blocks of the tower whose output is read; the rest run in vain."""
    class_place: bool = False
    """The tower's class token is one of the places that the text model gets."""
    dropout: float = 0.0
    """The largest dropout that its config.json has; a plan in words takes it over."""
    window: int = 0
    """Tokens that attention looks back, where its config.json has a limit; it saves no work, and makes a mask."""
    wide_scores: bool = False
    """Queries and keys are multiplied in float32 where attention is written out (transformers' GPT-J and GPT-Neo)."""
    notes: tuple[str, ...] = ()
    """What was taken for granted when its numbers were read, in sentences."""
    uncounted: tuple[str, ...] = ()
    """Dropout of its config.json that no estimate counts, in sentences; with any no verdict is ``fits``."""
    parameters: int = 0
    """Parameter count, for a model known by its size only (family ``size``)."""
    layer_bytes: int = 0
    """Activation bytes one layer keeps for the whole micro batch, where someone stated them (family ``size``)."""
    module: Module = Module()
    """Code of the user's own (families ``module`` and ``token-module``)."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.vision is not None and self.vision.vision is not None:
            raise PlanError(f"model {self.name}: its vision tower has a vision tower of its own")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 0:
                raise PlanError(f"model {self.name}: {field.name} {value} must be at least 0")

    @property
    def head_width(self) -> int:
        """Elements of one head."""
        return self.head_dim or self.hidden // max(self.heads, 1)

    @property
    def uneven(self) -> bool:
        """A head's value has another width than its key, which flash attention cannot take."""
        return self.value_dim not in (0, self.head_width)

    @property
    def written_out(self) -> bool:
        """Its scores are changed in a way that scaled_dot_product_attention cannot do without a bias of their size."""
        return self.positions == "alibi" or "attention" in self.capped

    @property
    def says_words(self) -> bool:
        """Its output is a score of each word of the vocabulary for each token."""
        return bool(self.vocab) and not self.classes and self.head in ("", "pretraining")

    @property
    def answers_once(self) -> bool:
        """Its output is one answer for a whole sample."""
        return self.head in ("pooled", "bare") or (self.classes > 0 and not self.head)

    @property
    def blocks(self) -> int:
        """Repeated parts, which can be checkpointed and sharded one by one."""
        seen = self.vision.layers if self.vision is not None else 0
        return self.layers + self.decoder_layers + sum(self.stages) + seen
