"""What one rank computes in a step, counted from its weights: matrix products with their three sizes, stage by stage.

A product of ``rows x k`` and ``k x n`` costs ``2 rows n k`` FLOPs and moves ``rows k + k n + rows n`` elements. Rows grow
with the micro batch and weights do not, so sums over all products are enough for the time at every micro batch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from math import isqrt, prod
from typing import TYPE_CHECKING

from memcalc.models import FAMILIES
from memcalc.spec import HEAD, ROOT, Model, Weight
from memcalc.stages import Stage, stage, stage_weights
from memcalc.tensor_parallel import local

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["OPERATIONS", "StageWork", "Sums", "ends_block", "model_flops", "pointwise", "stages_of"]

# The product that ends a block: non-reentrant checkpoints do not run it again. A block of the MLP ends with a ReLU and
# one of BERT with a LayerNorm, whose saved tensors need it.
_LAST = {
    "gpt2": ".mlp.c_proj.weight",
    "llama": ".mlp.down_proj.weight",
    "decoder": ".mlp.down_proj.weight",
    "vit": ".mlp.fc2.weight",
}

# Operations a block starts in forward, counted in trainers/models; backward starts about twice as many. A layer of
# a model known by its size is taken for a GPT block. Megatron's fuse bias, GELU and dropout. Each expert starts six more.
OPERATIONS = {
    "bert": 16,
    "decoder": 25,
    "gpt2": 14,
    "llama": 25,
    "megatron": 14,
    "mlp": 2,
    "moe": 45,
    "resnet": 10,
    "size": 14,
    "t5": 28,
    "vit": 14,
}

UNKNOWN = 5
"""Elements read or written for each that a product puts out, where blocks are no transformer's: a ResNet's BatchNorm reads
twice and writes once, its ReLU reads and writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """Sums over matrix products of one sample's forward pass; ``weights`` alone does not grow with samples."""

    products: float = 0.0
    """Multiplications: rows x n x k."""
    inputs: float = 0.0
    """Elements of the streams that go in: rows x k."""
    outputs: float = 0.0
    """Elements that come out: rows x n."""
    weights: float = 0.0
    """Elements of the weights: n x k."""
    count: float = 0.0
    """Products."""

    def __add__(self, other: Sums) -> Sums:
        return Sums(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWork:
    """What one stage of a pipeline computes on one rank; without a pipeline there is one."""

    stream: float
    """Elements that blocks read and write in one sample's forward pass beside their products."""
    blocks: Sums
    """Inside blocks."""
    ends: Sums
    """Before and after them: patches, projections, the head."""
    trained: Sums
    """Of both those whose weight gets a gradient, which takes a third product."""
    last: float
    """Multiplications of the products that end blocks."""
    logits: float
    """Elements of one sample's logits on this rank."""
    layers: int
    """Blocks."""
    share: float
    """Part of the model's blocks that is here, and so of its attention."""
    parameters: int
    trainable: int
    tensors: int
    """Weights one by one, trained or not."""
    first: bool
    final: bool


def ends_block(family: str) -> str:
    """How the name of the weight ends that a checkpoint need not run again; blank where there is none."""
    return _LAST.get(family, "")


def stages_of(plan: Plan) -> tuple[StageWork, ...]:
    """The stages of the plan's pipeline in order.

    >>> from memcalc.models import MODELS
    >>> from memcalc.plan import Plan
    >>> (only,) = stages_of(Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=1))
    >>> only.blocks.products == 1024 * 12 * 12 * 768**2, only.logits == 1024 * 50257
    (True, True)
    """
    return _stages(_Rank(plan))


class _Rank:
    """A plan as far as stages depend on it."""

    __slots__ = ("_key", "plan")

    def __init__(self, plan: Plan) -> None:
        of_blocks = plan.dropout > 0, plan.rms_norm, plan.implementation
        self.plan, self._key = plan, (plan.model, plan.tokens, plan.layout, plan.adapter, plan.frozen, *of_blocks)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rank) and self._key == other._key


@lru_cache(maxsize=256)
def _stages(key: _Rank) -> tuple[StageWork, ...]:
    plan = key.plan
    part = local(plan)
    scatters = plan.layout.tensor if plan.layout.sequence else 1
    weights = part.weights
    stages = [stage(plan, index) for index in range(plan.layout.pipeline)]
    each_token = pointwise(plan, part.model) / scatters, _inner(plan, part.model)
    return tuple(_stage(part.model, part.tokens, weights, plan.model.blocks, each, each_token) for each in stages)


def pointwise(plan: Plan, part: Model) -> float:
    """Elements that one block reads and writes for a token beside its products, across the stream: norms and residuals.

    A LayerNorm and a fused RMSNorm read and write once; one written out in float32 does so in six operations on numbers
    twice as wide. A sum reads two and writes one.
    """
    chained = part.family in ("llama", "decoder", "moe", "t5") and part.norm != "layer" and plan.rms_norm != "fused"
    norms, sums = (1, 1) if part.side_by_side == 1 else (2, 2)
    if part.post_norm:
        norms += 2
    dropout = 3 if plan.dropout else 0
    return part.hidden * (norms * (24 if chained else 2) + sums * (3 + dropout))


def _inner(plan: Plan, part: Model) -> float:
    """The same inside attention and MLP, which tensor parallel divides: rotary positions (two products, a rotation and a
    sum: ten an element), and activations (read and written; a gate multiplies: five for each of both)."""
    rotated = part.positions in ("", "rotary") and part.family in ("llama", "decoder", "moe")
    turned = 10 * (part.heads + part.kv_heads) * (part.rotary_dim or part.head_width) if rotated else 0
    gated = part.gated or part.family in ("llama", "moe")
    each = 3 if plan.implementation.gate_up == "kernel" or part.family == "megatron" else 5
    act = each if gated else 16 if plan.implementation.gelu == "python" else 2
    wide = part.ffn * part.top_k + part.shared_ffn if part.experts else part.ffn
    moved = 6 * part.hidden * part.top_k if part.experts else 0  # tokens to their experts and back
    return turned + act * wide + moved


def _stage(
    model: Model, tokens: int, weights: list[Weight], blocks: int, part: Stage, each_token: tuple[float, float]
) -> StageWork:
    family, last = FAMILIES[model.family], _LAST.get(model.family)
    here = stage_weights(weights, part, model.tied)
    inside, ends, trained, ending, logits = Sums(), Sums(), Sums(), 0.0, 0.0
    looked_up = part.of > 1 and model.tied and not part.last  # its token table is the head of another stage
    groups: dict[tuple[float, tuple[int, ...], bool, bool, bool], int] = {}
    for w in here:
        rows = family.rows(model, tokens, w)
        if rows and not (looked_up and w.group == ROOT):
            key = (rows, w.shape, "." in w.group, w.trainable, bool(last and w.name.endswith(last)))
            groups[key] = groups.get(key, 0) + 1
    for (rows, shape, block, trains, ends_one), times in groups.items():
        sums = _sums(model, rows, shape, times)
        inside, ends = (inside + sums, ends) if block else (inside, ends + sums)
        trained = trained + sums if trains else trained
        ending += sums.products if ends_one else 0.0
        logits += rows * model.vocab * times if model.vocab in shape and not block and model.says_words else 0.0
    layers = len({w.group for w in here if w.group not in (ROOT, HEAD) and "." in w.group})
    known = bool(model.hidden and model.heads and tokens)
    stream = layers * tokens * sum(each_token) if known else UNKNOWN * (inside.outputs + ends.outputs)
    return StageWork(
        stream=stream,
        blocks=inside,
        ends=ends,
        trained=trained,
        last=ending,
        logits=logits,
        layers=layers,
        share=part.blocks / blocks if part.of > 1 and blocks else 1.0,
        parameters=sum(w.numel for w in here),
        trainable=sum(w.numel for w in here if w.trainable),
        tensors=len(here),
        first=part.first,
        final=part.last,
    )


def _sums(model: Model, rows: float, shape: tuple[int, ...], times: int) -> Sums:
    """Of ``times`` equal weights. One of which only the size is known is taken for a square."""
    copies = times
    if len(shape) == 3 and model.experts and shape[0] == model.experts:  # experts side by side
        copies, shape = times * shape[0], shape[1:]
    numel = prod(shape)
    n = shape[0] if len(shape) > 1 else max(isqrt(numel), 1)
    k = numel / n
    return Sums(
        products=copies * rows * numel,
        inputs=copies * rows * k,
        outputs=copies * rows * n,
        weights=copies * numel,
        count=copies,
    )


def model_flops(plan: Plan) -> float:
    """FLOPs of one sample by the convention that MFU is quoted in: (6 N + 12 L H S) a token, with all N parameters
    (llm-foundry scripts/train/benchmarking; PaLM, appendix B), of experts those that a token takes; of what reads no
    tokens 6 a multiplication. Frozen parameters count 4: their gradient, a third of the products, is never computed.
    Recomputation does not count.

    >>> from memcalc.models import MODELS
    >>> from memcalc.plan import Plan
    >>> plan = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=1)
    >>> model_flops(plan) == 1024 * (6 * 124439808 + 12 * 12 * 768 * 1024)
    True
    """
    model, family = plan.model, plan.family
    weights = [(w, w.numel * (6 if w.trainable else 4)) for w in plan.weights]
    if not plan.tokens:
        return float(sum(each * family.rows(model, plan.tokens, w) for w, each in weights))
    share = model.top_k / model.experts if model.experts else 1.0
    active = sum(each * (share if ".experts." in w.name else 1.0) for w, each in weights)
    return plan.tokens * active + 12 * model.heads * model.head_width * sum(family.pairs(model, plan.tokens))
