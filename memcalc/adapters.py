"""Frozen and quantised weights, and the adapters trained in their place."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.errors import PlanError, shorten
from memcalc.groups import Group, knob
from memcalc.quantised import QUANTISED
from memcalc.spec import HEAD, ROOT, Weight

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["FIRST_PROMPTED", "KINDS", "PROMPTED", "TARGETS", "Adapter", "usual_dtype"]

KINDS = ("none", "lora", "adapter", "adapter-v2")
# Leaf names of linear layers, as PEFT's target_modules; a dotted name tells layers of one leaf name apart.
_QUERY_VALUE = (
    "q_proj", "v_proj", "c_attn", "query", "value", "q", "v", "qkv", "qkv_proj", "query_key_value", "q_b_proj", "kv_b_proj",
)  # fmt: skip
_ATTENTION = (
    *_QUERY_VALUE, "k_proj", "o_proj", "key", "k", "o", "attn.c_proj", "attn.proj", "attention.output.dense",
    "attention.dense", "self.out", "out_proj", "q_a_proj", "kv_a_proj_with_mqa",
)  # fmt: skip
TARGETS = {"query-value": _QUERY_VALUE, "attention": _ATTENTION, "all-linear": ()}
"""Names for sets of layers; ``all-linear`` is every linear layer of a block, not the head (peft/tuners/tuners_utils.py,
``_maybe_include_all_linear_layers``)."""

# litgpt/adapter.py, Config: the prompt's length, and the first layer that has one.
PROMPT, FIRST_PROMPTED = 10, 2
PROMPTED = ("llama", "gpt2", "decoder")
_OF_LORA = ("rank", "targets", "dropout", "fused", "scattered")


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter(Group):
    """Frozen and quantised weights, and the adapters trained in their place.

    >>> rank = Adapter(kind="lora", rank=8, targets="q_proj")
    >>> [(w.name, w.shape, w.trainable) for w in rank.weights([Weight("h.0.q_proj.weight", (64, 32), "h.0")])]
    [('h.0.q_proj.weight', (64, 32), False), ('h.0.q_proj.lora_A.weight', (8, 32), True), ('h.0.q_proj.lora_B.weight', (64, 8), True)]
    """

    kind: str = knob("none", "--adapter", "What is trained in place of the weights, which are frozen.", choices=KINDS)
    """``lora``; litgpt's LLaMA-Adapter ``adapter`` (a prompt in attention) and ``adapter-v2`` (that, norms, and scale
    and bias of every linear layer)."""
    rank: int = knob(8, "--adapter-rank", "Rank of LoRA's two factors.", least=1)
    targets: str = knob(
        "attention", "--adapter-targets",
        f"Linear layers with LoRA: {', '.join(TARGETS)}, or their names, separated by commas.",
    )  # fmt: skip
    dropout: float = knob(0.0, "--adapter-dropout", "Dropout on LoRA's input.")
    dtype: str = knob(
        "weights", "--adapter-dtype", "What adapters are kept in: like the weights, or float32 as PEFT does.",
        choices=("weights", "float32"), unsaid="of LoRA in torch's own strategies float32, else weights",
    )  # fmt: skip
    autocast: bool = knob(
        False, "--adapter-autocast", "float32 adapters are computed in the compute dtype, under torch.autocast."
    )
    input_gradients: bool = knob(
        False, "--input-gradients", "Gradients flow to the embeddings (enable_input_require_grads)."
    )
    quantize: str = knob(
        "none", "--quantize", "How the frozen linear layers of the blocks are stored.", choices=("none", *QUANTISED)
    )
    quantize_head: bool = knob(
        False, "--quantize-head", "The head is quantised, too, as with Lightning's BitsandbytesPrecision."
    )
    quantized_saves_input: bool = knob(
        False,
        "--quantized-saves-input",
        "Quantised layers keep their input for backward, as bitsandbytes before 0.43.2.",
    )
    fused: bool = knob(
        False,
        "--adapter-fused",
        "LoRA in autograd functions of its own, which keep their 16-bit input and nothing else.",
    )
    scattered: bool = knob(
        False,
        "--adapter-scattered",
        "LoRA on parts of one fused layer is put in its place by index_copy, as in litgpt.",
    )
    trains_rest: bool = knob(
        False, "--adapter-trains-rest", "All but the matrices with adapters is trained, too (no --only_optimize_lora)."
    )

    @property
    def freezes(self) -> bool:
        """The model's own weights are not trained."""
        return self.kind != "none"

    def idle(self, plan: Plan) -> dict[str, str]:
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("kind", "quantize")]
        if not self.freezes:
            return dict.fromkeys(names, "is for adapters; add --adapter lora")
        return {} if self.kind == "lora" else dict.fromkeys(_OF_LORA, f"is for LoRA, not for {self.kind}")

    def check(self, plan: Plan) -> None:
        if self.quantize != "none" and not self.freezes:
            raise PlanError(f"quantised weights ({self.quantize}) cannot be trained; take --adapter lora")
        self._check_idle(plan)
        if self.fused and self.dropout:
            raise PlanError(f"fused LoRA has no dropout, given {self.dropout}; leave out --adapter-dropout")
        if self.trains_rest and (self.kind != "lora" or self.quantize != "none"):
            raise PlanError("what has no adapter is trained only beside --adapter lora and without --quantize")
        if not 0 <= self.dropout < 1:
            raise PlanError(f"adapter dropout {self.dropout} must be at least 0 and below 1")
        if not self.freezes:
            return
        if self.dtype == "float32" and self.kind != "lora":
            raise PlanError(
                f"adapters of kind {self.kind} are kept like the weights; leave out --adapter-dtype float32"
            )
        if plan.strategy_row.main_grads or plan.layout.pipeline > 1 or plan.family.divides == "megatron":
            raise PlanError("adapters are not played with Megatron's parts nor in pipelines; take another --strategy")
        if plan.family.unplayed or plan.family.convolves:
            raise PlanError(f"adapters need linear layers, and of {plan.model.name} none are known; take another model")
        if self.kind != "lora" and plan.family.name not in PROMPTED:
            raise PlanError(f"adapters of kind {self.kind} are known for {', '.join(PROMPTED)}; take --adapter lora")
        if self.kind != "lora" and plan.model.layers <= FIRST_PROMPTED:
            raise PlanError(f"adapters of kind {self.kind} begin after {FIRST_PROMPTED} blocks; take --adapter lora")
        if self.kind == "lora" and not any(".lora_A." in weight.name for weight in plan.weights):
            leaves = sorted({name.rsplit(".", 1)[-1] for name in _linears(plan.family.weights(plan.model))})
            raise PlanError(f"adapter targets {self.targets!r} name no linear layer; there are: {', '.join(leaves)}")

        self._check_targets(plan)
        self._check_rank(plan)

    def _check_idle(self, plan: Plan) -> None:
        """Other groups may wait for a search to take them up; no search turns adapters on."""
        idle = self.idle(plan)
        for field in dataclasses.fields(self):
            if field.name in idle and getattr(self, field.name) != field.default:
                raise PlanError(f"{field.metadata['option']} {idle[field.name]}")

    def _check_rank(self, plan: Plan) -> None:
        """A factor with more rows than the layer it adapts has is no adapter but a slip."""
        if self.kind != "lora":
            return
        widest = max(max(shape) for shape in _linears(plan.family.weights(plan.model)).values())
        if self.rank > widest:
            raise PlanError(f"adapter rank {self.rank} must be at most the widest layer of {plan.model.name}, {widest}")

    def _check_targets(self, plan: Plan) -> None:
        names = [] if self.targets in TARGETS else [name.strip() for name in self.targets.split(",")]
        if self.kind != "lora" or not names:
            return
        linears = _linears(plan.family.weights(plan.model))
        for name in names:
            if not any(f".{linear}".endswith(f".{name}") for linear in linears):
                leaves = sorted({linear.rsplit(".", 1)[-1] for linear in linears})
                raise PlanError(f"adapter target {shorten(name)} is no linear layer; there are: {', '.join(leaves)}")

    def untrained(self, plan: Plan) -> str:
        if self.quantize != "none":
            return f"quantised weights ({self.quantize})"
        if self.kind not in ("none", "lora"):
            return f"with {self.kind}"
        if self.scattered or self.trains_rest or self.fused:
            return "with LoRA as litgpt, DeepSpeed-Chat or fused kernels have it"
        return ""

    def weights(self, weights: Sequence[Weight], heads: int = 1) -> list[Weight]:
        """The model's weights with the adapters' among them, in the order of the torch module's parameters().

        A prompt has a gate for each of ``heads``.
        """
        if not self.freezes:
            return list(weights)
        linears, found = _linears(weights), []
        if self.kind == "adapter-v2":
            linears |= {weight.name.rsplit(".", 1)[0]: weight.shape for weight in weights if _is_head(weight)}
        blocks = list(dict.fromkeys(weight.group for weight in weights if "." in weight.group))
        for index, weight in enumerate(weights):
            name = weight.name.rsplit(".", 1)[0]
            matrix = self.quantize_head if _is_head(weight) else name in linears and len(weight.shape) == 2
            quantised = self.quantize != "none" and matrix
            norm = self.kind == "adapter-v2" and name not in linears and weight.group != ROOT
            rest = self.trains_rest and not (name in linears and self.targeted(name) and len(weight.shape) == 2)
            found.append(dataclasses.replace(weight, trainable=norm or rest, dtype=self.quantize if quantised else ""))
            if not (index + 1 < len(weights) and weights[index + 1].name == f"{name}.bias"):
                found += self._added(name, linears, weight.group)
            last = index + 1 == len(weights) or weights[index + 1].group != weight.group
            if self.kind != "lora" and last and weight.group in blocks[FIRST_PROMPTED:]:
                found += _prompt(weights, weight.group, heads)
        return found

    @property
    def _dtype(self) -> str:
        return "float32" if self.dtype == "float32" else ""

    def _added(self, name: str, linears: dict[str, tuple[int, ...]], group: str) -> list[Weight]:
        """What an adapter puts beside one linear layer."""
        if name not in linears:
            return []
        out, width = linears[name]
        parts: dict[str, tuple[int, ...]] = {}
        if self.kind == "lora" and self.targeted(name):
            parts = {"lora_A.weight": (self.rank, width), "lora_B.weight": (out, self.rank)}
        elif self.kind == "adapter-v2":
            parts = {"adapter_bias": (out,), "adapter_scale": (out,)}
        return [Weight(f"{name}.{part}", shape, group, dtype=self._dtype) for part, shape in parts.items()]

    def targeted(self, name: str) -> bool:
        """LoRA is put on the linear layer of this name."""
        if self.targets == "all-linear":
            return True
        names = TARGETS.get(self.targets) or tuple(part.strip() for part in self.targets.split(","))
        return any(name == target or name.endswith(f".{target}") for target in names)


def usual_dtype(kind: str, engine: str) -> str:
    """What adapters are kept in where nobody says it: PEFT casts LoRA to float32 beside weights of any dtype
    (peft/tuners/tuners_utils.py, autocast_adapter_dtype); engines with master copies have those instead.

    >>> usual_dtype("lora", "torch"), usual_dtype("lora", "deepspeed"), usual_dtype("none", "torch")
    ('float32', 'weights', 'weights')
    """
    return "float32" if kind == "lora" and engine == "torch" else "weights"


def _is_head(weight: Weight) -> bool:
    return weight.group == HEAD and len(weight.shape) == 2


def _prompt(weights: Sequence[Weight], block: str, heads: int) -> list[Weight]:
    """A prompt for the attention of one block, and a gate for each head."""
    width = next(weight.shape[-1] for weight in weights if weight.group == ROOT)
    return [Weight(f"{block}.adapter_wte", (PROMPT, width), block), Weight(f"{block}.gating_factor", (heads,), block)]


def _linears(weights: Sequence[Weight]) -> dict[str, tuple[int, ...]]:
    """Linear layers of the blocks by name, with the shapes of their matrices."""
    return {
        weight.name.rsplit(".", 1)[0]: weight.shape
        for weight in weights
        if len(weight.shape) == 2 and "." in weight.group and re.search(r"\.weight$", weight.name)
    }
