"""Named Hypothesis strategies: models and plans small enough that a ledger takes milliseconds.

Everything drawn is sound: a Plan that exists is checked, so a test that fails has found something.
"""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from memcalc.adapters import FIRST_PROMPTED, PROMPTED, TARGETS, Adapter
from memcalc.checkpointing import Checkpointing
from memcalc.compute import FLOAT8, Compute
from memcalc.fsdp import Fsdp
from memcalc.implementation import Implementation
from memcalc.kernels import Attends, refusal
from memcalc.layout import Layout
from memcalc.loss import Loss
from memcalc.models import FAMILIES, Model
from memcalc.offload import Offload
from memcalc.optimizers import OPTIMIZERS
from memcalc.plan import Plan
from memcalc.precision import PRECISIONS
from memcalc.quantised import QUANTISED
from memcalc.sound import ATTENTIONS
from memcalc.strategies import STRATEGIES
from tests.drawn_fields import checkpointings, deepspeeds, losses, offloads, updates
from tests.drawn_models import gpt2s, llamas, megatrons, models

__all__ = [
    "ALLOCATORS",
    "DROPOUT",
    "adapters",
    "attentions",
    "divided",
    "fsdps",
    "implementations",
    "pipelines",
    "plans",
    "precisions",
    "worlds",
]

# As people set PYTORCH_CUDA_ALLOC_CONF.
ALLOCATORS = ("", "expandable_segments:True", "max_split_size_mb:128", "roundup_power2_divisions:[64:8,256:4,>:1]")
# Families whose modules have dropout.
DROPOUT = ("gpt2", "decoder", "bert", "vit", "t5", "mlp", "whisper", "mbart")


@st.composite
def worlds(draw: st.DrawFn, max_ranks: int = 8) -> tuple[str, int, int]:
    """A strategy, ranks, and nodes that divide them."""
    strategy = draw(st.sampled_from(list(STRATEGIES.values())))
    ranks = draw(st.integers(1, max_ranks)) if strategy.parallel else 1
    nodes = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    return strategy.name, ranks, nodes


def precisions(strategy: str) -> list[str]:
    """The precisions a strategy can train in."""
    row = STRATEGIES[strategy]
    if row.main_grads or row.zero_stage is not None:
        return [each.name for each in PRECISIONS.values() if each.master or each.name == "fp32"]
    return [each.name for each in PRECISIONS.values() if row.masters or not each.master]


def attentions(model: Model, device: str, precision: str, dropout: float) -> list[str]:
    """The attention kinds that exist for a model, a device, a precision and a dropout."""
    head = model.head_width
    asked = Attends(
        device=device, dtype=PRECISIONS[precision].compute, head=head, value=model.value_dim or head, dropout=dropout
    )
    return [kernel for kernel in ATTENTIONS if not refusal(kernel, asked)]


@st.composite
def fsdps(
    draw: st.DrawFn, strategy: str, ranks: int, plain: bool, adapter: Adapter, precision: str, shared: bool
) -> Fsdp:
    """FSDP's fields, with replicas that divide the ranks where there are any."""
    row = STRATEGIES[strategy]
    if not row.gathers:
        return Fsdp()
    replicas = draw(st.sampled_from([0, *(n for n in range(1, ranks + 1) if ranks % n == 0)])) if row.replicates else 0
    one_dtype = adapter.dtype == "weights" or PRECISIONS[precision].weights == "float32"
    mixes = adapter.freezes and adapter.quantize == "none" and one_dtype
    plain = plain or (adapter.freezes and not mixes and (ranks == 1 or row.replicates))
    version = "2" if plain else draw(st.sampled_from(["1", "2"]))
    return Fsdp(
        version=version,
        separate_root=version == "2" and not shared and draw(st.booleans()),
        adapter_units=draw(st.booleans()) if mixes else True,
        replicas=replicas,
        reduce_dtype=draw(st.sampled_from(["weights", "compute", "float32"])),
        forward_prefetch=draw(st.booleans()),
        backward_prefetch=draw(st.sampled_from(["pre", "post", "none"])),
        original_parameters=adapter.freezes or draw(st.booleans()),
        sync_every_micro_batch=draw(st.booleans()),
    )


@st.composite
def adapters(draw: st.DrawFn, model: Model) -> Adapter:
    """No adapter half of the time; else LoRA over quantised or plain weights."""
    if FAMILIES[model.family].opaque or FAMILIES[model.family].convolves or draw(st.booleans()):
        return Adapter()
    quantize = draw(st.sampled_from(["none", *QUANTISED]))
    prompted = model.family in PROMPTED and model.layers > FIRST_PROMPTED and not model.kv_lora
    kind = draw(st.sampled_from(["lora", *["adapter-v2"] * prompted]))
    lora = kind == "lora"
    dropout = draw(st.sampled_from([0.0, 0.1])) if lora else 0.0
    return Adapter(
        kind=kind,
        fused=lora and not dropout and draw(st.booleans()),
        scattered=lora and draw(st.booleans()),
        trains_rest=lora and quantize == "none" and draw(st.booleans()),
        rank=draw(st.integers(1, max(1, min(5, max(model.hidden, *model.widths, 0))))) if lora else Adapter().rank,
        targets="all-linear"
        if model.family == "mlp"
        else draw(st.sampled_from(list(TARGETS if lora else [Adapter().targets]))),
        dropout=dropout,
        dtype=draw(st.sampled_from(["weights", "float32"] if kind == "lora" else ["weights"])),
        input_gradients=draw(st.booleans()),
        quantize=quantize,
        quantized_saves_input=draw(st.booleans()),
    )


@st.composite
def pipelines(draw: st.DrawFn, model: Model) -> Layout:
    """Ways to divide a model's layers over up to three stages, most often none."""
    parts = [(stages, chunks) for stages in (2, 3) for chunks in (1, 2) if stages * chunks <= model.layers]
    stages, chunks = draw(st.sampled_from([(1, 1), *parts]))
    if stages == 1:
        return Layout()
    schedule = "interleaved" if chunks > 1 else draw(st.sampled_from(["gpipe", "1f1b"]))
    return Layout(pipeline=stages, chunks=chunks, schedule=schedule, ends=draw(st.booleans()))


@st.composite
def plans(draw: st.DrawFn, model: st.SearchStrategy[Model] | None = None, max_ranks: int = 8) -> Plan:
    """Sound plans over every strategy, precision, optimizer, attention and kind of checkpointing."""
    chosen = draw(models() if model is None else model)
    reads = FAMILIES[chosen.family].reads
    strategy, ranks, nodes = draw(worlds(max_ranks))
    encodes = FAMILIES[chosen.family].encodes
    one_sequence = reads == "tokens" and not encodes
    whole = STRATEGIES[strategy].one_process or (STRATEGIES[strategy].zero_stage or 0) > 1
    layout = draw(pipelines(chosen)) if one_sequence and not whole else Layout()
    ranks *= layout.pipeline
    row = STRATEGIES[strategy]
    gathers, divides = row.gathers, row.gathers or (row.main_grads and row.shards_optimizer) or bool(row.zero_stage)
    optimizer = draw(st.sampled_from([row for row in OPTIMIZERS.values() if row.shardable or not divides]))
    device = draw(st.sampled_from(["cuda", "cpu"]))
    precision = draw(st.sampled_from(precisions(strategy)))
    accumulation, set_to_none = draw(st.integers(1, 10 if layout.pipeline > 1 else 3)), draw(st.booleans())
    waits = (
        row.buckets or row.flat_units or row.main_grads or layout.pipeline > 1 or accumulation > 1 or not set_to_none
        or chosen.family == "size"
    )  # fmt: skip
    waits = waits or row.one_process or row.zero_stage is not None
    update = draw(updates(optimizer, waits or PRECISIONS[precision].master))
    dropout = draw(st.sampled_from([0.0, 0.1])) if chosen.family in DROPOUT else 0.0
    written_out = FAMILIES[chosen.family].written_out
    checkpoint_every = draw(st.integers(0, 2 if encodes else 3))
    tokens = draw(st.integers(1, chosen.context - chosen.position_offset)) if reads == "tokens" else 0
    float8 = draw(st.sampled_from(FLOAT8)) if tokens and PRECISIONS[precision].compute == "bfloat16" else "none"
    reentrant = bool(checkpoint_every) and not encodes and draw(st.booleans())
    away = not reentrant and chosen.family != "size" and draw(st.booleans())
    scaled = "logits" in (*chosen.scaled, *chosen.capped)
    loss = draw(losses(device, tokens, scaled)) if tokens and not row.one_process and chosen.says_words else Loss()
    adapter = Adapter() if row.main_grads or layout.pipeline > 1 else draw(adapters(chosen))
    if row.zero_stage is not None and (adapter.quantize != "none" or adapter.dtype != "weights"):
        adapter = Adapter()
    if adapter != Adapter():
        update = dataclasses.replace(update, ema="none")
    return Plan(
        model=chosen,
        strategy=strategy,
        ranks=ranks,
        nodes=nodes,
        precision=precision,
        optimizer=optimizer.name,
        optimizer_kind=draw(st.sampled_from(optimizer.kinds)),
        micro_batch=draw(st.integers(1, 4)),
        accumulation=accumulation,
        tokens=tokens,
        checkpoint_every=checkpoint_every,
        reentrant=reentrant,
        attention=draw(st.sampled_from(attentions(chosen, device, precision, dropout)))
        if chosen.heads and not written_out and not chosen.written_out
        else "auto",
        dropout=dropout,
        loss_dtype=draw(
            st.sampled_from(["float32", "logits"] if gathers or not PRECISIONS[precision].autocast else ["float32"])
        ),
        keep_logits=loss.whole_logits and draw(st.booleans()),
        loss=loss,
        bucket_mb=draw(st.sampled_from([1, 25])),
        bucket_views=draw(st.booleans()),
        static_graph=draw(st.booleans()),
        set_to_none=set_to_none,
        update=update,
        compute=Compute(compile=not reentrant and draw(st.booleans()), float8=float8, offload_activations=away),
        device=device,
        fsdp=draw(
            fsdps(
                strategy,
                ranks // layout.pipeline,
                update.in_backward,
                adapter,
                precision,
                chosen.tied or encodes,
            )
        ),  # fmt: skip
        deepspeed=draw(deepspeeds(strategy)),
        offload=Offload()
        if layout.pipeline > 1
        else draw(offloads(strategy, optimizer.name, device, adapter.freezes or update.in_backward)),
        implementation=draw(implementations(chosen)),
        allocator=draw(st.sampled_from(ALLOCATORS)),
        layout=layout,
        adapter=adapter,
        checkpointing=draw(checkpointings(chosen)) if checkpoint_every and not reentrant else Checkpointing(),
    )


@st.composite
def implementations(draw: st.DrawFn, model: Model) -> Implementation:
    """How a model's code may be written."""
    drawn = {
        field.name: draw(st.sampled_from(sorted(field.metadata["choices"])))
        for field in dataclasses.fields(Implementation)
    }
    return Implementation.suited(model, drawn)


@st.composite
def divided(draw: st.DrawFn) -> Plan:
    """Plans of every family that tensor parallel can divide, with tensor, sequence and context parallel drawn."""
    drawn = draw(plans(model=st.one_of(gpt2s(), llamas())).filter(lambda plan: not plan.strategy_row.one_process))
    model, tokens = draw(st.one_of(st.just(drawn.model), megatrons())), 8
    if model.family != "megatron":
        model = dataclasses.replace(model, ffn=4 * -(-model.ffn // 4))
    megatron = model.family == "megatron"
    plain = [name for name in precisions(drawn.strategy) if not PRECISIONS[name].autocast]
    precision = draw(st.sampled_from(plain)) if megatron else drawn.precision
    low = PRECISIONS[precision].compute != "float32"
    flash = drawn.device == "cuda" and low and not (megatron and model.positions == "alibi")
    tensor = draw(st.sampled_from([n for n in (1, 2, 4) if not model.kv_heads % n]))
    context = draw(st.sampled_from([1, 2])) if flash else 1
    layout = Layout(
        tensor=tensor, sequence=tensor > 1 and draw(st.booleans()), context=context,
        loss_parallel=tensor > 1 and not megatron and draw(st.booleans()),
    )  # fmt: skip
    attention = "flash" if context > 1 else draw(st.sampled_from(["eager", *["flash"] * flash]))
    return dataclasses.replace(
        drawn, model=model, tokens=tokens, fsdp=dataclasses.replace(drawn.fsdp, separate_root=False), precision=precision, ranks=drawn.data_parallel * layout.model_parallel, nodes=1,
        adapter=Adapter(), checkpointing=Checkpointing(),
        implementation=Implementation() if megatron else drawn.implementation,
        layout=layout, attention=attention, dropout=drawn.dropout if model.family != "llama" else 0.0,
        loss=Loss(form=drawn.loss.form if drawn.loss.form == "compiled" and not megatron else "plain"),
        loss_dtype="float32", keep_logits=False, compute=Compute(),
    )  # fmt: skip
