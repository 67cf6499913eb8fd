"""The ways to spread one training run over ranks: what each shards, and the backend that runs it."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.catalog import Catalog

__all__ = ["STRATEGIES", "Strategy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """One row: what the strategy divides over ranks and which file of ``trainers/backends`` runs it."""

    name: str
    summary: str
    parallel: bool = True
    """Runs on more than one rank."""
    shards_parameters: bool = False
    shards_gradients: bool = False
    shards_optimizer: bool = False
    reshards: bool = False
    """Frees a block's gathered parameters after its forward pass and gathers them again for backward."""
    buckets: bool = False
    """DDP's flat gradient buckets, kept for the whole run."""
    zero_stage: int | None = None
    """DeepSpeed's ZeRO stage, 0 to 3."""
    replicates: bool = False
    """Shards within a group of ranks and keeps a copy of the shards in every group (HSDP)."""
    one_process: bool = False
    """One process drives all GPUs; the first of them holds the batch, the outputs and the loss of all."""
    flat_units: bool = False
    """FSDP 1's flat parameters: a unit's gradients are put together at the end of its backward."""
    main_grads: bool = False
    """Megatron-LM's buffer of gradients, beside which there are no others; its precisions are fp32 and those with masters."""
    masters: bool = False
    """Can keep float32 master copies of 16-bit weights (the precisions that say so)."""
    engine: str = "torch"
    """What runs it as a pipeline (the names in memcalc/engines.py)."""
    backend: str = ""
    """Module in trainers/backends; blank where memcalc can estimate the strategy but not run it."""

    @property
    def plain(self) -> bool:
        """Torch alone runs it, a process for each GPU: what is tried where nothing else is asked for."""
        return bool(self.backend) and self.engine == "torch" and not self.one_process

    @property
    def gathers(self) -> bool:
        """FSDP gathers parameters unit by unit before use; DeepSpeed's stage 3 does so module by module."""
        return self.shards_parameters and self.zero_stage is None


STRATEGIES: Catalog[Strategy] = Catalog(
    "strategy",
    [
        Strategy(name="single", summary="one rank, nothing divided", parallel=False, backend="single"),
        Strategy(
            name="ddp",
            summary="a full copy per rank; gradients are averaged through buckets",
            buckets=True,
            backend="ddp",
        ),
        Strategy(
            name="data-parallel",
            summary="one process for all GPUs (nn.DataParallel); the first one also takes all outputs and the loss",
            one_process=True,
            backend="data_parallel",
        ),
        Strategy(
            name="zero-1",
            summary="DDP with the optimizer states divided, whole tensors to ranks (ZeroRedundancyOptimizer)",
            shards_optimizer=True,
            buckets=True,
            backend="zero_1",
        ),
        Strategy(
            name="fsdp-no-shard",
            summary="FSDP's wrapper with nothing divided (NO_SHARD, like ZeRO-0)",
            flat_units=True,
            backend="fsdp_no_shard",
        ),
        Strategy(
            name="fsdp-shard-grad-op",
            summary="gradients and states divided; parameters stay gathered from forward to backward (like ZeRO-2)",
            shards_parameters=True,
            shards_gradients=True,
            shards_optimizer=True,
            backend="fsdp",
        ),
        Strategy(
            name="fsdp-full-shard",
            summary="parameters, gradients and states divided; blocks gathered when used (like ZeRO-3)",
            shards_parameters=True,
            shards_gradients=True,
            shards_optimizer=True,
            reshards=True,
            backend="fsdp",
        ),
        Strategy(
            name="fsdp-hybrid-shard-grad-op",
            summary="fsdp-shard-grad-op within a group of ranks, a copy in every group (_HYBRID_SHARD_ZERO2)",
            shards_parameters=True,
            shards_gradients=True,
            shards_optimizer=True,
            replicates=True,
            backend="fsdp",
        ),
        Strategy(
            name="fsdp-hybrid-shard",
            summary="fsdp-full-shard within a group of ranks, a copy of the shards in every group (HSDP)",
            shards_parameters=True,
            shards_gradients=True,
            shards_optimizer=True,
            reshards=True,
            replicates=True,
            backend="fsdp",
        ),
        Strategy(
            name="deepspeed-0",
            summary="DeepSpeed with nothing divided (ZeRO stage 0)",
            zero_stage=0,
            masters=True,
            engine="deepspeed",
            backend="deepspeed",
        ),
        Strategy(
            name="deepspeed-1",
            summary="DeepSpeed with master copies and states divided (ZeRO stage 1)",
            shards_optimizer=True,
            zero_stage=1,
            masters=True,
            engine="deepspeed",
            backend="deepspeed",
        ),
        Strategy(
            name="deepspeed-2",
            summary="DeepSpeed with gradients divided as well (ZeRO stage 2)",
            shards_gradients=True,
            shards_optimizer=True,
            zero_stage=2,
            masters=True,
            engine="deepspeed",
            backend="deepspeed",
        ),
        Strategy(
            name="deepspeed-3",
            summary="DeepSpeed with parameters divided as well, gathered module by module (ZeRO stage 3)",
            shards_parameters=True,
            shards_gradients=True,
            shards_optimizer=True,
            reshards=True,
            zero_stage=3,
            masters=True,
            engine="deepspeed",
            backend="deepspeed",
        ),
        Strategy(
            name="megatron-ddp",
            summary="Megatron-LM: a full copy per rank; gradients are summed in one buffer",
            main_grads=True,
            masters=True,
            engine="megatron",
        ),
        Strategy(
            name="megatron-distributed",
            summary="Megatron-LM's distributed optimizer: the same with master copies and states divided",
            shards_optimizer=True,
            main_grads=True,
            masters=True,
            engine="megatron",
        ),
    ],
    aliases={
        "dp": "data-parallel",
        "hybrid_shard": "fsdp-hybrid-shard",
        "_hybrid_shard_zero2": "fsdp-hybrid-shard-grad-op",
        "hsdp": "fsdp-hybrid-shard",
        "zero-0": "deepspeed-0",
        "zero-2": "deepspeed-2",
        "zero2": "deepspeed-2",
        "zero-3": "deepspeed-3",
        "zero3": "deepspeed-3",
        "fsdp2": "fsdp-full-shard",
        "full_shard": "fsdp-full-shard",
        "shard_grad_op": "fsdp-shard-grad-op",
        "no_shard": "fsdp-no-shard",
        "fsdp": "fsdp-full-shard",
    },
)
