"""Plan: one training run said in full. It is sound once it exists, and survives JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from memcalc.adapters import Adapter
from memcalc.allocator_options import AllocatorOptions
from memcalc.checkpointing import Checkpointing
from memcalc.compute import Compute
from memcalc.deepspeed import DeepSpeed
from memcalc.errors import FileError, PlanError, shorten
from memcalc.files import read_json, write_text
from memcalc.frozen import Frozen
from memcalc.fsdp import Fsdp
from memcalc.groups import Group
from memcalc.hardware import GPUS, Gpu
from memcalc.implementation import Implementation
from memcalc.kernels import Attends, chosen
from memcalc.layout import Layout
from memcalc.loss import Loss
from memcalc.models import FAMILIES, Model
from memcalc.offload import Offload
from memcalc.optimizers import OPTIMIZERS, Optimizer
from memcalc.precision import PRECISIONS, Precision
from memcalc.records import build, check_types
from memcalc.sound import check_attention, check_effects, check_fields, check_world, name_exactly
from memcalc.spec import Weight
from memcalc.startup import Startup
from memcalc.strategies import STRATEGIES, Strategy
from memcalc.update import Update

__all__ = ["PLAN_VERSION", "Plan"]

PLAN_VERSION = 1
# native_functions.yaml of the 2.9 release has a CUDA kernel for _fused_rms_norm; in 2.8 it does not exist.
FUSED_RMS_NORM_SINCE = (2, 9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One run, said in full. Raises PlanError, with the numbers that clash, when it makes no sense.

    >>> from memcalc.models import MODELS
    >>> plan = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=8)
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    model: Model
    strategy: str = "single"
    ranks: int = 1
    """World size: processes, one GPU each."""
    nodes: int = 1
    precision: str = "fp32"
    optimizer: str = "adamw"
    optimizer_kind: str = "foreach"
    """How ``step()`` walks the parameters: foreach (torch's default on CUDA), for-loop or fused."""
    micro_batch: int = 0
    """Samples per rank and forward pass; 0 only where a model is known by its size alone."""
    accumulation: int = 1
    """Micro batches per optimizer step."""
    tokens: int = 0
    """Tokens per sample; 0 for models that do not read tokens."""
    checkpoint_every: int = 0
    """Blocks per activation checkpoint: 0 keeps all activations, 1 is full checkpointing."""
    reentrant: bool = False
    """The older, reentrant form of torch.utils.checkpoint."""
    attention: str = "auto"
    """Attention kernel; ``auto`` is what scaled_dot_product_attention would choose, see ``kernel``."""
    dropout: float = 0.0
    loss_dtype: str = "float32"
    """Cross-entropy of float32 copies of the logits, or of the ``logits`` as they come."""
    keep_logits: bool = False
    """The loop still refers to the model's output in backward."""
    bucket_mb: int = 25
    """DDP's bucket_cap_mb."""
    bucket_views: bool = False
    """DDP's gradient_as_bucket_view."""
    static_graph: bool = False
    """DDP's static_graph: in the first step gradients are sent after backward, and the model's output is copied once."""
    set_to_none: bool = True
    """zero_grad(set_to_none=True): gradients are freed after the step."""
    device: str = "cuda"
    gpu: str | None = None
    """The card it shall fit on, by catalog name; None leaves the verdict open."""
    torch: str = "2.13"
    """torch version, major.minor: what older ones kept in memory differs."""
    loss: Loss = Loss()
    update: Update = Update()
    compute: Compute = Compute()
    allocator: str = ""
    """PYTORCH_CUDA_ALLOC_CONF as the run has it."""
    layout: Layout = Layout()
    implementation: Implementation = Implementation()
    adapter: Adapter = Adapter()
    fsdp: Fsdp = Fsdp()
    deepspeed: DeepSpeed = DeepSpeed()
    offload: Offload = Offload()
    checkpointing: Checkpointing = Checkpointing()
    startup: Startup = Startup()
    frozen: Frozen = Frozen()

    def __post_init__(self) -> None:
        check_types(self)
        name_exactly(self)
        if self.loss.vocab_multiple > 1:  # the padded one is what all else is counted by
            vocab = -(-self.model.vocab // self.loss.vocab_multiple) * self.loss.vocab_multiple
            object.__setattr__(self, "model", dataclasses.replace(self.model, vocab=vocab))
        check_fields(self)
        check_world(self)
        check_attention(self)
        check_effects(self)
        self.family.check(self.model, self)
        for group in self.groups:
            group.check(self)

    @property
    def weights(self) -> list[Weight]:
        """Every parameter of the model, frozen ones and adapters included."""
        return list(_weights(self.model, self.adapter, self.frozen))

    @property
    def groups(self) -> tuple[Group, ...]:
        values = (getattr(self, name) for name in self.__slots__)
        return tuple(value for value in values if isinstance(value, Group))

    @property
    def untrained(self) -> str:
        """What ``trainers/`` cannot do of this plan, in words that follow "cannot train"; blank when it can."""
        if not self.strategy_row.backend:
            return f"with {self.strategy}"
        if self.strategy_row.one_process and self.device == "cpu":
            return f"with {self.strategy} on the CPU, where nn.DataParallel divides nothing; take ddp"
        if 0 < self.model.window <= self.tokens:
            return f"with {self.tokens} tokens and a sliding window of {self.model.window}"
        said: str = self.family.untrained(self.model)
        return said or next((said for group in self.groups if (said := group.untrained(self))), "")

    @property
    def strategy_row(self) -> Strategy:
        return STRATEGIES[self.strategy]

    @property
    def precision_row(self) -> Precision:
        return PRECISIONS[self.precision]

    @property
    def optimizer_row(self) -> Optimizer:
        return OPTIMIZERS[self.optimizer]

    @property
    def gpu_row(self) -> Gpu | None:
        return None if self.gpu is None else GPUS[self.gpu]

    @property
    def allocator_options(self) -> AllocatorOptions:
        """Before torch 2.12 ROCm only warns of expandable segments (pytorch pull requests 173330, 177974)."""
        options, gpu = AllocatorOptions.parse(self.allocator), self.gpu_row
        if gpu is not None and gpu.architecture.startswith("gfx") and self.torch_version < (2, 12):
            return dataclasses.replace(options, expandable_segments=False)
        return options

    @property
    def family(self) -> Any:
        return FAMILIES[self.model.family]

    @property
    def attends(self) -> Attends:
        """What the plan asks of attention (memcalc/kernels.py)."""
        return Attends(
            device=self.device,
            dtype=self.precision_row.compute,
            head=self.model.head_width,
            value=self.model.value_dim or self.model.head_width,
            dropout=self.dropout if self.family.drops_shares else 0.0,
            masked=self.masked,
            gpu=self.gpu_row,
        )

    @property
    def masked(self) -> bool:
        """Attention is given a mask, because the sequence is as long as the window it looks back, or longer
        (transformers/masking_utils.py, _ignore_causal_mask_sdpa); flash-attn's own library, which is ``flash`` on CUDA when it
        is asked for, takes the window itself."""
        return 0 < self.model.window <= self.tokens and not (self.attention == "flash" and self.device == "cuda")

    @property
    def kernel(self) -> str:
        """The attention kernel: for ``auto`` the first that scaled_dot_product_attention can use on the card."""
        if self.family.written_out or (self.attention == "auto" and self.model.written_out):
            return "eager"
        return chosen(self.attends) if self.attention == "auto" else self.attention

    @property
    def reduce_dtype(self) -> str:
        """dtype in which FSDP reduces gradients."""
        named = {"weights": self.precision_row.weights, "compute": self.precision_row.compute}
        return named.get(self.fsdp.reduce_dtype, "float32")

    @property
    def gathers_unknown_layers(self) -> bool:
        """Parameters are gathered layer by layer, but it is not known how many layers there are."""
        return self.strategy_row.gathers and self.family.opaque and not self.model.layers

    @property
    def rms_norm(self) -> str:
        """How RMSNorm is computed; ``auto`` is F.rms_norm: one kernel on CUDA from the version that added it, else a chain.
        Compiled ones are one kernel in any version.

        The chain keeps what one in Python does that multiplies by its weight in float32.
        """
        if self.compute.compile and self.device == "cuda":
            return "fused"
        if self.implementation.norm != "auto":
            return self.implementation.norm
        return "fused" if self.device == "cuda" and self.torch_version >= FUSED_RMS_NORM_SINCE else "chain"

    @property
    def torch_version(self) -> tuple[int, int]:
        """``(major, minor)``."""
        match = re.match(r"([0-9]{1,3})\.([0-9]{1,3})(?![0-9])", self.torch)
        if match is None:
            raise PlanError(f"torch version {shorten(self.torch)} cannot be read; write it like 2.13")
        return int(match[1]), int(match[2])

    @property
    def data_parallel(self) -> int:
        """Ranks that work on samples of their own."""
        return self.ranks // self.layout.model_parallel

    @property
    def processes(self) -> int:
        """Processes that are started, one for each rank unless one drives all GPUs."""
        return 1 if self.strategy_row.one_process else self.ranks

    @property
    def shards(self) -> int:
        """Ranks over which a strategy divides parameters, gradients and states: all that hold the same weights, or
        with replicas those of one."""
        return self.data_parallel * self.layout.context // (self.fsdp.groups(self) * self.layout.optimizer_instances)

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.micro_batch * self.accumulation * self.data_parallel

    def to_json(self) -> str:
        """The plan as JSON text, with the version of the format."""
        return json.dumps({"memcalc_plan": PLAN_VERSION} | dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_dict(cls, data: Any, source: str = "plan") -> Plan:
        """A plan from parsed JSON. Raises FileError for another format, PlanError for bad values."""
        if not isinstance(data, dict) or "memcalc_plan" not in data:
            raise FileError(
                f"{source} is not a memcalc plan (a JSON object with 'memcalc_plan'); make one with recommend --save-plan"
            )
        version = data["memcalc_plan"]
        if type(version) is not int or version != PLAN_VERSION:
            newer = isinstance(version, int) and version > PLAN_VERSION
            cure = "update memcalc" if newer else "make it anew with recommend --save-plan"
            raise FileError(
                f"{source} is a plan of version {shorten(version)}; this memcalc reads version {PLAN_VERSION}: {cure}"
            )
        fields = {key: value for key, value in data.items() if key != "memcalc_plan"}
        fields.setdefault("model", None)
        return build(cls, fields, source)

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> Plan:
        """A plan from JSON text."""
        return cls.from_dict(read_json(text, source), source)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """A plan from a file. Raises FileError."""
        return cls.from_dict(read_json(Path(path), str(path)), str(path))

    def save(self, path: str | Path) -> None:
        """Write the plan, whole or not at all. Raises FileError."""
        write_text(Path(path), self.to_json())


@lru_cache(maxsize=64)
def _weights(model: Model, adapter: Adapter, frozen: Frozen) -> tuple[Weight, ...]:
    return tuple(frozen.weights(adapter.weights(FAMILIES[model.family].weights(model), model.heads)))
