"""The bench: what a row of published facts is read as, how it is scored, and that accuracy is not lost unseen."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import published
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from memcalc.bench.defaults import FRAMEWORKS, framework_of
from memcalc.bench.layouts import parse_layout
from memcalc.bench.rows import COLUMNS, METERS, Row, read_rows, select
from memcalc.bench.run import by_meter, by_source, reasons, score
from memcalc.bench.score import Score, percentile, summarise, worst
from memcalc.bench.words import say
from memcalc.cli.app import app
from memcalc.cli.bench import FACTS
from memcalc.errors import FileError, InputError
from memcalc.estimate import estimate
from memcalc.hardware import GPUS
from memcalc.layout import Layout
from memcalc.plan import Plan
from memcalc.reserved import replayed

# One run said in full: GPT-2 small in bfloat16 on one card.
GPT2 = {
    "id": "x-1", "source": "someone/project README", "model": "GPT-2 124M", "n_params": "124439808", "hidden": "768",
    "layers": "12", "heads": "12", "kv_heads": "12", "ffn": "3072", "vocab": "50257", "seq_len": "1024",
    "micro_batch_per_gpu": "4", "grad_accum": "1", "n_gpus": "1", "gpu_type": "A100-80GB", "gpu_gib": "80",
    "strategy": "single", "param_dtype": "bf16", "compute_dtype": "bf16", "optimizer": "AdamW",
    "activation_checkpointing": "none", "attention": "sdpa", "compile": "no", "offload": "none",
    "metric": "max_memory_allocated", "value_gib": "4.0", "notes": "tier A",
}  # fmt: skip
LLAMA = GPT2 | {
    "model": "Llama-2-7B", "n_params": "6738415616", "hidden": "4096", "layers": "32", "heads": "32", "kv_heads": "32",
    "ffn": "11008", "vocab": "32000",
}  # fmt: skip


def text_of(*rows: dict[str, str], columns: tuple[str, ...] = COLUMNS) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def row_of(base: dict[str, str] = GPT2, **cells: str) -> Row:
    values = dict.fromkeys(COLUMNS, "") | base | cells
    measured = float(values["value_gib"]) if METERS[values["metric"]] != "boundary" else None
    return Row(id=values["id"], source=values["source"], metric=values["metric"], measured=measured, cells=values)


def plan_of(base: dict[str, str] = GPT2, **cells: str) -> Plan:
    said = say(row_of(base, **cells))
    assert said.plan is not None, said.lacks
    return said.plan


def lacks_of(base: dict[str, str] = GPT2, **cells: str) -> list[str]:
    return [lack.reason for lack in say(row_of(base, **cells)).lacks]


# -- files -----------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "rows.csv"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_rows_are_read(file: Callable[[str], Path]) -> None:
    (row,) = read_rows(file("\ufeff" + text_of(GPT2 | {"value_gib": " 4.0 "}) + "\n"))
    assert (row.id, row.measured, row.meter, row.tier, row.group) == ("x-1", 4.0, "allocated", "A", "someone/project")
    assert row.whole("layers") == 12
    assert row.whole("lora_rank") is None
    assert row_of(seq_len="<=512").whole("seq_len") is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is empty"),
        ("  \n\n", "is empty"),
        ("id,source\n", r"has no column model, n_params, hidden, layers, heads and \d+ more"),
        (text_of(columns=(*COLUMNS[:-1],)), "has no column notes;"),
        (text_of(columns=(*COLUMNS, "id")), "has the column id twice"),
        (text_of(), "has columns but no rows"),
        (text_of(GPT2) + "a,b\n", "line 3 has 2 cells, but there are 31 columns"),
        (text_of(GPT2, GPT2), "line 3: the id 'x-1' stands twice"),
        (text_of(GPT2 | {"id": " "}), "line 2: id is blank"),
        (text_of(GPT2 | {"source": ""}), "line 2: source is blank"),
        (text_of(GPT2 | {"metric": "max_memory"}), "unknown metric 'max_memory'; did you mean 'max_memory_"),
        *((text_of(GPT2 | {"value_gib": value}), f"value_gib '{value}' must be") for value in ("nan", "-1", "inf", "4 GB", "")),
        (text_of(GPT2) + '"open', "line 3 is not valid CSV"),
        (text_of(GPT2 | {"notes": "n" * 200_000}), "is not valid CSV: field larger than field limit"),
        ("id,\0source\n", "holds NUL bytes"),
    ],
    ids=range(19),
)  # fmt: skip
def test_a_broken_file_is_refused_in_one_line(file: Callable[[str], Path], text: str, fault: str) -> None:
    with pytest.raises(FileError, match=fault) as caught:
        read_rows(file(text))
    assert "\n" not in str(caught.value)


def test_a_binary_or_huge_or_missing_file_is_refused(tmp_path: Path) -> None:
    binary, huge = tmp_path / "binary.csv", tmp_path / "huge.csv"
    binary.write_bytes(b"\xff\xfe\x00id")
    with huge.open("wb") as stream:
        stream.truncate(65 * 2**20)
    for path, fault in ((binary, "not UTF-8"), (huge, "larger than 64 MiB"), (tmp_path / "no.csv", "does not exist")):
        with pytest.raises(FileError, match=fault):
            read_rows(path)


def test_a_boundary_needs_no_value(file: Callable[[str], Path]) -> None:
    (row,) = read_rows(file(text_of(GPT2 | {"metric": "OOM", "value_gib": ""})))
    assert row.measured is None
    assert row.meter == "boundary"


def test_filters() -> None:
    rows = [row_of(id="a"), row_of(id="b", notes="tier B; x"), row_of(id="c", source="Other/Thing", notes="")]
    rows = [
        Row(id=r.id, source=r.source, metric=r.metric, measured=1.0, cells=r.cells | {"use": "score"}) for r in rows
    ]
    assert [row.id for row in select(rows, tier="B")] == ["b"]
    assert [row.id for row in select(rows, use="score", source="other")] == ["c"]
    with pytest.raises(InputError, match="none of the 3 rows is left with --tier C --source x"):
        select(rows, tier="C", source="x")
    with pytest.raises(InputError, match="no column 'use'"):
        select([row_of()], use="score")


# -- the grammar -----------------------------------------------------------------------------------


def test_a_row_said_in_full_becomes_its_plan() -> None:
    plan = plan_of()
    assert (plan.model.family, plan.model.context, plan.model.tied) == ("gpt2", 1024, True)
    assert (plan.tokens, plan.micro_batch, plan.precision, plan.optimizer, plan.optimizer_kind) == (
        1024, 4, "bf16", "adamw", "foreach",
    )  # fmt: skip
    assert plan.gpu == "a100-80gb"


@pytest.mark.parametrize(
    ("text", "cards", "strategy", "ranks"),
    [
        ("single", "1", "single", 1),
        ("ddp4", "4", "ddp", 4),
        ("ddp", "4", "ddp", 4),
        ("fsdp_full_shard8 (FSDP2)", "8", "fsdp-full-shard", 8),
        ("fsdp_full_shard8", "", "fsdp-full-shard", 8),
        ("fsdp8+cp1", "8", "fsdp-full-shard", 8),
        ("fsdp_shard_grad_op2", "2", "fsdp-shard-grad-op", 2),
        ("fsdp_no_shard2", "2", "fsdp-no-shard", 2),
        ("zero1+dp2 (torch ZeroRedundancyOptimizer)", "2", "zero-1", 2),
        ("ddp+dp8+tp1+pp1", "8", "ddp", 8),
    ],
)
def test_strategies_that_are_there(text: str, cards: str, strategy: str, ranks: int) -> None:
    plan = plan_of(strategy=text, n_gpus=cards)
    assert (plan.strategy, plan.ranks) == (strategy, ranks)


@pytest.mark.parametrize(
    ("text", "cards", "notes", "layout"),
    [
        ("fsdp2+tp4", "8", "", Layout(tensor=4)),
        ("fsdp2+tp4", "8", "sequence parallel", Layout(tensor=4, sequence=True)),
        ("fsdp2+cp4", "8", "", Layout(context=4)),
        ("ddp+dp1+tp1+pp4", "4", "", Layout(pipeline=4)),
        ("ddp+dp2+pp4", "8", "virtual pipeline 1", Layout(pipeline=4, chunks=3, schedule="interleaved")),
        ("ddp+dp2+pp4", "8", "partition type:transformer|embedding", Layout(pipeline=4, ends=True)),
        ("tp4+pp2+dp1", "8", "", Layout(tensor=4, pipeline=2)),
    ],
)
def test_degrees_of_a_layout(text: str, cards: str, notes: str, layout: Layout) -> None:
    plan = plan_of(strategy=text, n_gpus=cards, notes=notes, grad_accum="4")
    assert (plan.layout, plan.ranks) == (layout, int(cards))


def test_megatrons_flags_say_what_its_model_is() -> None:
    notes = (
        "transformer_engine layers; sequence parallel; flags: swiglu, disable-bias-linear, position-embedding-type=rope"
    )
    cells = {
        "source": "NVIDIA/Megatron-LM tests", "model": "Megatron GPT 12 layers h512", "hidden": "512", "heads": "8",
        "kv_heads": "8", "ffn": "2048", "n_params": "", "strategy": "zero1+dp2+tp4+pp1", "n_gpus": "8",
        "param_dtype": "bf16+fp32 master", "compute_dtype": "bf16", "optimizer": "Adam (fused)", "attention": "unfused",
    }  # fmt: skip
    plan = plan_of(notes=notes, **cells)
    assert (plan.strategy, plan.layout) == ("megatron-distributed", Layout(tensor=4, sequence=True))
    # 8/3 of the width in multiples of 64; the vocabulary in multiples of 128 for each of four ranks.
    assert (plan.model.ffn, plan.model.vocab, plan.model.biases, plan.model.positions) == (1344, 50688, (), "rotary")
    assert (plan.dropout, plan.attention, plan.implementation.megatron) == (0.1, "eager", "transformer-engine")
    assert lacks_of(notes="flags: multi-latent-attention", **cells) == ["Megatron's --multi-latent-attention"]
    last = say(row_of(notes="read on the last rank", **cells | {"strategy": "ddp+dp2+tp2+pp2"}))
    assert last.stage == 1


@pytest.mark.parametrize(
    ("text", "cards", "missing"),
    [
        ("tp4+pp16+dp2", "128", ["data parallel of a kind that is not stated"]),
        ("zero1+dp8+tp1+pp1", "8", ["DeepSpeed's or Megatron's ZeRO 1"]),
        ("zero3[8]", "8", ["DeepSpeed's ZeRO 3"]),
        ("hsdp8", "8", ["hybrid sharding"]),
        ("fsdp_full_shard8 + CPU offload", "8", ["offload cpu"]),
        ("fsdp_full_shard8 (fairscale)", "8", ["fairscale's FSDP"]),
        ("fsdp_shard_grad_op8 (zero2, thunder fsdp)", "8", ["thunder's own FSDP"]),
        ("dp8 (DataParallel, one process)", "8",
         ["DataParallel, one process for all cards", "data parallel of a kind that is not stated"]),
        ("fsdp or ddp (not stated)", "8", ["strategy is not stated"]),
        ("", "8", ["strategy is not stated"]),
        ("a cluster", "8", ["strategy 'a cluster' is of no known form"]),
        ("ddp4", "8", ["strategy says 4 ranks, n_gpus says 8"]),
        ("ddp", "", ["n gpus is not stated"]),
    ],
)  # fmt: skip
def test_strategies_that_are_not(text: str, cards: str, missing: list[str]) -> None:
    assert lacks_of(strategy=text, n_gpus=cards) == missing


@given(st.text(max_size=40))
def test_any_text_is_a_layout_or_none(text: str) -> None:
    parsed = parse_layout(text)
    assert parsed is None or all(degree >= 0 for degree in parsed[0].values())


@pytest.mark.parametrize(
    ("cells", "precision"),
    [
        ({"param_dtype": "fp32", "compute_dtype": "fp32"}, "fp32"),
        ({"param_dtype": "fp32", "compute_dtype": "amp_bf16", "grad_dtype": "fp32"}, "amp-bf16"),
        ({"param_dtype": "fp32", "compute_dtype": "bf16 (autocast)", "optimizer_state_dtype": "fp32"}, "amp-bf16"),
        ({"param_dtype": "fp32", "compute_dtype": "fp16 (amp), channels_last"}, "amp-fp16"),
        ({"param_dtype": "bf16", "compute_dtype": "bf16", "reduce_dtype": "bf16"}, "bf16"),
    ],
)
def test_dtypes_that_are_there(cells: dict[str, str], precision: str) -> None:
    assert plan_of(**cells).precision == precision


@pytest.mark.parametrize(
    ("cells", "missing"),
    [
        ({"compute_dtype": "mxfp8"}, "8-bit and 4-bit matrix products"),
        ({"param_dtype": "nf4 base + bf16"}, "quantised weights"),
        ({"param_dtype": "int4 (gptq) base"}, "quantised weights"),
        ({"param_dtype": ""}, "dtypes are not stated"),
        ({"compute_dtype": "bf16 (autocast)"}, "weights in bf16 with compute in bf16 autocast"),
        ({"optimizer_state_dtype": "fp32"}, "optimizer state dtype fp32 beside weights in bf16"),
        ({"grad_dtype": "fp32"}, "grad dtype fp32 beside weights in bf16"),
        ({"optimizer": ""}, "optimizer is not stated"),
        ({"optimizer": "Muon"}, "optimizer Muon"),
        ({"activation_checkpointing": "selective(op)"}, "selective activation checkpointing"),
        ({"activation_checkpointing": "every other"}, "checkpointing every other"),
        ({"attention": "flex"}, "attention flex"),
        ({"lora_rank": "8"}, "LoRA"),
        ({"notes": "tier B; QLoRA on q"}, "LoRA"),
        ({"notes": "tier B; Adapter v2"}, "adapters"),
        ({"notes": "tier A; optimizer step fused in backward"}, "the optimizer's step inside backward"),
        ({"notes": "tier A; thunder-cudnn"}, "thunder's own compiler"),
        ({"offload": "activations->cpu"}, "offload activations->cpu"),
        ({"micro_batch_per_gpu": ""}, "micro batch per gpu is not stated"),
        ({"micro_batch_per_gpu": "8 (local batch)"}, "micro batch per gpu is '8 (local batch)', not a number"),
        ({"seq_len": "<=512", "n_params": ""}, "seq len is '<=512', not a number"),
        ({"grad_accum": "4 printed"}, "grad accum is '4 printed', not a number"),
        ({"vocab": ""}, "vocab is not stated"),
        ({"attention": "flash", "param_dtype": "fp32", "compute_dtype": "fp32"},
         "no sound plan: flash attention on CUDA computes in 16 bit, not float32, take --attention efficient or amp-bf16"),
    ],
)  # fmt: skip
def test_what_memcalc_has_no_term_for_is_named(cells: dict[str, str], missing: str) -> None:
    found = score(row_of(**cells))
    assert found.skipped == missing
    assert found.estimated_gib is found.error_pct is found.verdict is None


def test_a_skipped_row_names_all_that_lacks() -> None:
    found = score(row_of(strategy="zero2", lora_rank="8", optimizer="FusedAdam"))
    assert found.skipped == "DeepSpeed's ZeRO 2; optimizer FusedAdam; LoRA"


def test_optimizers() -> None:
    assert (plan_of(optimizer="AdamW (fused)").optimizer_kind, plan_of(optimizer="SGD").optimizer) == ("fused", "sgd")
    eight_bit = plan_of(optimizer="AdamW8bit (bnb)", optimizer_state_dtype="int8")
    assert (eight_bit.optimizer, eight_bit.optimizer_kind) == ("adamw-8bit", "fused")
    assert plan_of(optimizer="decoupled_adamw").optimizer_kind == "for-loop"


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("bert-large-uncased", "BERT-type encoders"),
        ("mt0-xxl (12B)", "T5-type encoder-decoders"),
        ("torchvision resnet50", "convolutional nets"),
        ("vit_base_patch16_224", "vision transformers"),
        ("Mixtral-8x7B", "Mixture of Experts"),
        ("Megatron HYBRID layers h1024", "Megatron's GPT layers"),
        ("Gemma-2-27b", "Gemma's layers (soft caps, its own norm)"),
        ("something new", "none for 'something new'"),
    ],
)
def test_families_that_are_not(name: str, missing: str) -> None:
    assert lacks_of(model=name) == [f"model family: {missing}"]


@pytest.mark.parametrize(
    "name", ["Llama-2-7B", "LLaMA2-7B", "Llama 2 7 B", "Llama-7B", "Meta-Llama-2-7B", "vicuna-7b-v1.5-16k"]
)
def test_names_of_llama(name: str) -> None:
    assert plan_of(LLAMA, model=name).model.family == "llama"


def test_a_model_must_have_its_parameters() -> None:
    assert lacks_of(n_params="124000000") == ["model family: gpt2 has 124,439,808 parameters here, not 124,000,000"]
    assert (plan_of(seq_len="512").tokens, plan_of(seq_len="512").model.context) == (512, 1024)
    tied = str(6738415616 - 32000 * 4096)
    assert lacks_of(LLAMA, n_params=tied) == ["model family: Llama with its head tied to the embedding"]
    assert plan_of(LLAMA, n_params="").model.layers == 32
    assert lacks_of(layers="999999999999") == ["layers 999999999999 is no number of layers"]


MLP = {"model": "MLP input:1565_output:273_depth:2_arch:uniform_batch:123_act:tanh_dropout:0.49_dropout:False_batchnorm:False",
       "n_params": "5329098", "vocab": "", "param_dtype": "fp32", "compute_dtype": "fp32"}  # fmt: skip


def test_the_width_of_an_mlp_follows_from_its_parameters() -> None:
    plan = plan_of(**MLP)
    assert (plan.model.hidden, plan.model.features, plan.model.classes, plan.model.layers) == (1565, 1565, 273, 2)
    assert estimate(plan).parameters == 5329098


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ("tanh", "gelu", "an MLP with gelu"),
        ("uniform", "pyramid", "an MLP of pyramid widths"),
        ("_dropout:False", "_dropout:True", "an MLP with dropout"),
        ("batchnorm:False", "batchnorm:True", "an MLP with batch normalisation"),
        ("output:273", "output:274", "no width of the MLP gives the stated parameters"),
        ("depth:2", "depth:1", "no width of the MLP gives the stated parameters"),
        ("output:273", "output:99999999", "no width of the MLP gives the stated parameters"),
    ],
)
def test_mlps_that_are_not(old: str, new: str, missing: str) -> None:
    assert lacks_of(**MLP | {"model": MLP["model"].replace(old, new)}) == [f"model family: {missing}"]


def test_a_model_of_no_family_is_its_size_where_activations_are_negligible() -> None:
    demo = {"model": "nn.Transformer demo", "layers": "32 enc + 32 dec", "n_params": "1000000000", "hidden": "1024",
            "seq_len": "35", "micro_batch_per_gpu": "1"}  # fmt: skip
    said = say(row_of(**demo))
    assert said.plan is not None
    assert (said.plan.model.family, said.plan.model.layers) == ("size", 64)
    # 34 bytes x 35 tokens x 1024 x 64 layers
    assert "activations left out: about 74 MiB (34 B per token, width and layer)" in said.assumptions
    assert lacks_of(**demo | {"seq_len": "350"}) == ["model family: none, and its activations are not negligible"]


# -- defaults --------------------------------------------------------------------------------------


def test_a_blank_cell_is_the_frameworks_default_and_noted() -> None:
    blank = dict.fromkeys(("grad_accum", "attention", "activation_checkpointing", "compile", "offload"), "")
    said = say(row_of(**blank))
    assert said.plan == plan_of()
    noted = {sentence.split()[0] for sentence in said.assumptions}
    assert noted >= set(blank)


def test_the_longest_source_names_the_framework() -> None:
    assert framework_of("Lightning-AI/litgpt tutorials").name == "LitGPT"
    assert framework_of("Lightning-AI/litgpt extensions/thunder/README.md").name == "LitGPT with thunder"
    assert framework_of("nobody/knows").name == "PyTorch"
    assert plan_of(source="Lightning-AI/pytorch-lightning docs").torch == "2.0"


def test_every_default_says_where_it_is_documented() -> None:
    for framework in FRAMEWORKS:
        assert framework.sources
        for default in framework.defaults.values():
            assert default.value
            assert len(default.source) > 10


def test_compile_is_counted_as_eager_with_norms_in_one_kernel() -> None:
    compiled = say(row_of(LLAMA, compile="yes", source="Lightning-AI/lightning-thunder issue"))
    assert compiled.plan is not None
    assert compiled.plan.fused_rms_norm
    assert any("counted as eager" in sentence for sentence in compiled.assumptions)
    assert not plan_of(LLAMA, source="Lightning-AI/lightning-thunder issue").fused_rms_norm


def test_a_loss_that_needs_less_leaves_a_peak_in_the_step_as_it_is() -> None:
    notes = "tier A; fused linear cross-entropy"
    step = {"notes": notes, "seq_len": "64"}
    found = score(row_of(**step))
    assert (found.moment, found.skipped) == ("step", None)
    assert "fused or chunked loss: not counted, the peak is in the step" in found.assumptions
    # What is reserved depends on every moment, and a peak elsewhere on the loss.
    assert score(row_of(**step | {"metric": "max_memory_reserved"})).skipped == "fused or chunked loss"
    assert score(row_of(notes=notes)).skipped == "fused or chunked loss"


@pytest.mark.parametrize(
    ("cells", "card", "same"),
    [
        ({"gpu_type": "A100-SXM4-40GB", "gpu_gib": "40"}, "a100-40gb", True),
        ({"gpu_type": "a100_80gb", "gpu_gib": "80"}, "a100-80gb", True),
        ({"gpu_type": "V100", "gpu_gib": "31.7"}, "v100-32gb", True),
        ({"gpu_type": "H100 (HBM2e 96GB)", "gpu_gib": "95.04"}, "h100-80gb", False),
        ({"gpu_type": "A10", "gpu_gib": "24"}, "a10", True),
        ({"gpu_type": "A100 (repo docs)", "gpu_gib": ""}, "a100-80gb", False),
        ({"gpu_type": "", "gpu_gib": ""}, None, False),
    ],
)
def test_cards(cells: dict[str, str], card: str | None, same: bool) -> None:
    said = say(row_of(**cells))
    assert said.plan is not None
    assert (said.plan.gpu, said.same_card) == (card, same)
    boundary = {"metric": "fits", "value_gib": ""}
    assert bool(lacks_of(**cells | boundary)) is not same


# -- scores ----------------------------------------------------------------------------------------


def test_a_score_by_hand() -> None:
    peak = estimate(plan_of()).peak
    found = score(row_of(value_gib="2"))
    assert found.estimated_gib == pytest.approx(peak.bytes / 2**30, abs=1e-4)
    assert found.error_pct == pytest.approx(100 * (peak.bytes / 2**30 / 2 - 1), abs=0.01)
    assert (found.measured_gib, found.moment, found.verdict) == (2.0, peak.moment, "fits")


def test_each_meter_is_read_as_itself() -> None:
    plan = plan_of(strategy="ddp8", n_gpus="8")
    held = replayed(plan, estimate(plan).timeline).peak_reserved
    found = {
        metric: score(row_of(strategy="ddp8", n_gpus="8", metric=metric)).estimated_gib
        for metric in ("max_memory_allocated", "max_memory_reserved", "nvidia-smi")
    }
    card = GPUS["a100-80gb"]
    outside = (sum(card.context) + sum(card.nccl)) / 2
    assert found["max_memory_allocated"] == pytest.approx(estimate(plan).peak.bytes / 2**30, abs=1e-4)
    assert found["max_memory_reserved"] == pytest.approx(held / 2**30, abs=1e-4)
    assert found["nvidia-smi"] == pytest.approx((held + outside) / 2**30, abs=1e-3)


def test_a_context_the_source_states_is_taken() -> None:
    cells = MLP | {"metric": "nvidia-smi", "micro_batch_per_gpu": "1"}
    without, stated = (
        score(row_of(**cells, source=source)).estimated_gib for source in ("a/b c", "itu-rad/GPUMemNet x")
    )
    assert without is not None and stated is not None
    difference = (1229 + 1536) / 2 / 1024 - sum(GPUS["a100-80gb"].context) / 2 / 2**30
    assert stated - without == pytest.approx(difference, abs=1e-3)


def test_outcomes_are_held_against_the_card() -> None:
    small, large = (
        {"metric": "fits", "value_gib": ""},
        {"metric": "OOM", "value_gib": "", "micro_batch_per_gpu": "4000"},
    )
    fits, oom = score(row_of(**small)), score(row_of(**large))
    assert (fits.verdict, fits.error_pct, fits.measured_gib) == ("fits", None, None)
    assert (oom.verdict, oom.skipped) == ("does-not-fit", None)
    assert summarise([fits, oom]).to_dict() == {
        "rows": 2, "median_abs_error_pct": None, "p90_abs_error_pct": None, "bias_pct": None,
        "false_fits": 0, "false_ooms": 0,
    }  # fmt: skip
    wrong = [score(row_of(**small | {"metric": "OOM"})), score(row_of(**large | {"metric": "fits"}))]
    assert (summarise(wrong).false_fits, summarise(wrong).false_ooms) == (1, 1)


def made(
    error: float | None, *, metric: str = "nvidia-smi", verdict: str = "tight", skipped: str | None = None
) -> Score:
    return Score(id="x", metric=metric, measured_gib=1.0, error_pct=error, verdict=verdict, skipped=skipped)


def test_statistics_by_hand() -> None:
    found = summarise([*map(made, (-10.0, -1.0, 2.0, 3.0)), made(None, skipped="x"), made(None, metric="OOM")])
    assert found.rows == 5
    assert found.median_abs_error_pct == 2.5  # of 1, 2, 3, 10
    assert found.p90_abs_error_pct == 7.9  # 0.9 of the way through three gaps: 3 + 0.7 * 7
    assert found.bias_pct == 0.5  # of -10, -1, 2, 3
    assert (found.under_estimates, found.skipped, found.false_fits, found.false_ooms) == (2, 1, 0, 0)
    assert summarise([]).median_abs_error_pct is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_a_percentile_lies_within_its_values(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found is not None
    assert min(values) - 1e-6 <= found <= max(values) + 1e-6
    assert percentile(values, 0) == min(values)
    assert percentile(values, 1) == max(values)


def test_the_worst_come_first() -> None:
    wrong = made(None, metric="OOM", verdict="fits")
    right = made(None, metric="fits", verdict="fits")
    ordered = worst([made(1.0), made(-5.0), right, wrong, made(None, skipped="x"), made(0.0)], 5)
    assert [each.error_pct for each in ordered] == [None, -5.0, 1.0]
    assert len(worst([made(1.0), made(2.0)], 1)) == 1


def test_meters_are_never_mixed() -> None:
    rows = [row_of(), row_of(metric="max_memory_reserved"), row_of(metric="OOM", value_gib=""), row_of(source="a/b c")]
    scores = [score(row) for row in rows]
    assert {meter: each.rows for meter, each in by_meter(rows, scores).items()} == {
        "allocated": 2, "reserved": 1, "boundary": 1,
    }  # fmt: skip
    assert list(by_source(rows, scores)) == [
        ("a/b", "allocated"),
        ("someone/project", "allocated"),
        ("someone/project", "reserved"),
        ("someone/project", "boundary"),
    ]


def test_reasons_are_counted_alone_and_together() -> None:
    skipped = [made(None, skipped=text) for text in ("a; b", "a", "a; c", "b; c")]
    assert reasons([*skipped, made(1.0)]) == [("a", 3, 1), ("b", 2, 0), ("c", 2, 0)]


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., Result]:
    path = tmp_path / "rows.csv"
    path.write_text(text_of(GPT2, GPT2 | {"id": "x-2", "lora_rank": "8"}, GPT2 | {"id": "x-3", "value_gib": "1"}))
    return lambda *words: CliRunner().invoke(app, ["bench", str(path), *words])


def test_json_has_the_shape_of_the_issue(bench: Callable[..., Result]) -> None:
    found = json.loads(bench("--format", "json").stdout)
    assert list(found) == ["summary", "meters", "sources", "rows"]
    six = ["rows", "median_abs_error_pct", "p90_abs_error_pct", "bias_pct", "false_fits", "false_ooms"]
    assert list(found["summary"]) == six
    assert list(found["meters"]["allocated"]) == six
    assert found["sources"][0]["skipped"] == 1
    assert [list(row) for row in found["rows"]] == [
        ["id", "metric", "measured_gib", "estimated_gib", "error_pct", "verdict", "moment", "assumptions", "skipped"]
    ] * 3
    assert [row["skipped"] for row in found["rows"]] == [None, "LoRA", None]
    assert found["summary"]["rows"] == 2
    only = json.loads(bench("--format", "json", "--worst", "1").stdout)
    assert [row["id"] for row in only["rows"]] == ["x-3"]
    assert only["summary"] == found["summary"]


def test_the_table_shows_sources_worst_rows_and_reasons(bench: Callable[..., Result]) -> None:
    text = bench("--worst", "1").stdout
    assert re.search(r"^someone/project +allocated +2 +1 ", text, re.MULTILINE)
    assert re.search(r"^all +allocated +2 +1 ", text, re.MULTILINE)
    assert re.search(r"^x-3 +max_memory_allocated +1\.000 ", text, re.MULTILINE)
    assert re.search(r"^LoRA +1 +1$", text, re.MULTILINE)
    assert bench("--format", "markdown").stdout.startswith("| source ")
    lines = bench("--format", "csv").stdout.splitlines()
    assert len(lines) == 4
    assert lines[2] == "x-2,max_memory_allocated,4.000,,,,,LoRA"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--tier", "D"], "unknown tier 'D'"),
        (["--source", "nobody"], "none of the 3 rows is left"),
        (["--use", "score"], "no column 'use'"),
        (["--worst", "0"], "--worst 0 must be at least 1"),
        (["--format", "xml"], "unknown format"),
    ],
)
def test_mistakes_are_one_line(bench: Callable[..., Result], words: list[str], fault: str) -> None:
    done = bench(*words)
    assert done.exit_code == 2
    assert fault in done.stderr
    assert len(done.stderr.splitlines()) == 1


@given(st.lists(st.tuples(st.sampled_from(COLUMNS[2:28]), st.text(max_size=12)), max_size=4))
def test_no_cell_breaks_the_bench(changes: list[tuple[str, str]]) -> None:
    found = score(row_of(**dict(changes)))
    assert (found.skipped is None) == (found.estimated_gib is not None)


# -- accuracy --------------------------------------------------------------------------------------

# Percent, median of the absolute errors over the facts that come with memcalc: today's figures rounded up. They guard
# what has been reached; no constant of memcalc is fitted to them. Lower them when a term is added.
REACHED = {
    ("foundation-model-stack/fms-acceleration", "allocated"): 1,
    ("itu-rad/GPUMemNet", "device"): 3,
    ("Lightning-AI/lightning-thunder", "allocated"): 3,
    ("Lightning-AI/litgpt", "allocated"): 8,
    ("Lightning-AI/pytorch-lightning", "allocated"): 1,
    ("pytorch/torchtitan", "allocated"): 11,
    ("pytorch/torchtitan", "reserved"): 11,
}


def test_accuracy_on_published_facts_is_not_lost() -> None:
    rows = read_rows(FACTS)
    scores = [score(row) for row in rows]
    assert [found.skipped for found in scores if found.skipped] == []
    found = by_source(rows, scores)
    assert {key for key in found if key[1] != "boundary"} == set(REACHED)
    for key, summary in found.items():
        assert (summary.false_fits, summary.false_ooms) == (0, 0)
        if key in REACHED:
            assert summary.median_abs_error_pct is not None
            assert summary.median_abs_error_pct <= REACHED[key], key


def test_the_page_of_results_is_of_today() -> None:
    text = published.PAGE.read_text(encoding="utf-8")
    assert published.refreshed(text) == text, "run `make docs`"
