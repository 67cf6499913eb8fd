"""Published speeds: how a table is read, what its rows mean, and that nothing is said of rows that say nothing."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memcalc.bench.throughput.grammar import Arrangement, parse
from memcalc.bench.throughput.plans import run_of
from memcalc.bench.throughput.rows import COLUMNS, Timing, half_of, read_timings, select
from memcalc.coefficients import published
from memcalc.errors import FileError, InputError
from memcalc.plan import Plan
from tests.published_speeds import LLAMA, known, plan_of, run_with, timing

KINDS = ("ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "fsdp_no_shard", "zero0", "zero1", "zero2", "zero3", "dp")
degrees = st.sampled_from((1, 2, 3, 8, 16))


@st.composite
def arrangements(draw: st.DrawFn) -> Arrangement:
    parts = draw(st.sampled_from((0, 1, 2, 8)))
    return Arrangement(
        kind="hsdp" if parts and draw(st.booleans()) else draw(st.sampled_from(KINDS)),
        data=draw(degrees) * max(parts, 1), tensor=draw(degrees), pipeline=draw(degrees), context=draw(degrees),
        expert=draw(degrees), shard=parts, interleaved=draw(st.booleans()), sequence=draw(st.booleans()),
    )  # fmt: skip


@given(arrangements())
def test_an_arrangement_is_read_back_from_its_words(said: Arrangement) -> None:
    assert parse(str(said)) == said
    assert said.ranks == said.data * said.tensor * said.pipeline * said.context


def test_cells_of_the_column_strategy() -> None:
    assert parse("single") == Arrangement(kind="single")
    assert parse("zero1+dp1024+tp1+shard8") == Arrangement(kind="zero1", data=1024, shard=8)
    assert parse("hsdp16+shard8+pp4+ep8") == Arrangement(kind="hsdp", data=16, shard=8, pipeline=4, expert=8)
    assert parse("dp1+tp2+pp4") == Arrangement(kind="dp", tensor=2, pipeline=4)
    assert parse("tp16") == Arrangement(kind="dp", tensor=16)
    assert parse("dp2(DataParallel)") == Arrangement(kind="dp", data=2, one_process=True)
    assert parse(" FSDP_full_shard8+TP8+pp8+interleaved ") == Arrangement(
        kind="fsdp_full_shard", data=8, tensor=8, pipeline=8, interleaved=True
    )


@pytest.mark.parametrize(
    "text",
    ["", "+", "fsdp", "zero4+dp8", "zero1", "zero18+dp2", "dp0", "ddp8+dp8", "zero1+dp8+tp2+tp2", "hsdp32", "hsdp32+shard5",
     "single8", "ddp1000000+tp2", "zero1+dp9999999", "dp2+tp2(DataParallel)", "ddp8+sp+sp", "ddp-8", "ddp8 tp2", "single or ddp"],
)  # fmt: skip
def test_what_is_not_of_the_grammar_is_nothing(text: str) -> None:
    assert parse(text) is None
    if text:
        assert "strategy" in (run_with(strategy=text).skipped or "")


@given(st.text(alphabet="zerofsdphtpcsingle_+0123456789() ", max_size=30))
@example("zero1+dp8+shard3")
def test_any_text_is_nothing_or_an_arrangement_of_its_words(text: str) -> None:
    found = parse(text)
    assert found is None or parse(str(found)) == found


def _text(*rows: dict[str, str], columns: tuple[str, ...] = COLUMNS) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (_text(LLAMA | {"metric": "step_h"}), "line 2: unknown metric 'step_h'; did you mean 'step_s'?"),
        (_text(LLAMA | {"value": ""}), "line 2: value '' must be a number above 0"),
        (_text(LLAMA | {"value": "nan"}), "line 2: value 'nan' must be a number above 0"),
        (_text(LLAMA | {"value": "-3"}), "line 2: value '-3' must be a number above 0"),
        (_text(LLAMA, LLAMA), "line 3: the id 'x-1' stands twice"),
        (_text(LLAMA | {"source": ""}), "line 2: source is blank"),
        (_text(LLAMA, columns=COLUMNS[:-2]), "no column value, notes"),
        ("", "is empty"),
    ],
)
def test_a_broken_table_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "speeds.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(FileError) as error:
        read_timings(file)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_number_is_lower_the_faster() -> None:
    assert timing(metric="step_ms", value="20").cost == 0.02
    assert timing(metric="epoch_h", value="2").cost == 7200
    assert timing(metric="samples_per_s", value="4").cost == 0.25
    assert timing(metric="OOM", value="").cost is None


def test_rows_are_chosen_by_tier_source_and_comparison() -> None:
    rows = [timing(id="a"), timing(id="b", notes="tier B; cmp=none"), timing(id="c", source="other/one x")]
    assert [row.id for row in select(rows, tier="B")] == ["b"]
    assert [row.id for row in select(rows, comparison="strict", source="OTHER")] == ["c"]
    with pytest.raises(InputError, match="none of the 3 rows is left with --tier C --cmp partial"):
        select(rows, tier="C", comparison="partial")
    assert timing(notes="tier A; cmp=curious").comparison == "none"


def test_halves_are_by_the_page_and_both_hold_enough() -> None:
    rows = known().values()
    for half in ("calibration", "never used"):
        contests = {row.contest for row in rows if row.half == half and row.comparison == "strict"}
        assert len(contests) >= 15
    assert len({half_of(f"a/b README, table {number}") for number in range(20)} | {half_of("a/b README: a table")}) == 1
    assert len({half_of(f"a/b README-{number}.md") for number in range(20)}) == 2


def test_the_widest_layouts_exactly() -> None:
    plan = run_of(known()["bs176-044"]).plan
    assert plan is not None
    assert (plan.strategy, plan.ranks, plan.nodes, plan.precision) == ("deepspeed-1", 384, 48, "fp16-master")
    assert (plan.layout.tensor, plan.layout.pipeline, plan.micro_batch, plan.accumulation) == (4, 12, 2, 128)
    assert (plan.model.layers, plan.model.hidden, plan.global_batch, plan.checkpoint_every) == (72, 14336, 2048, 1)
    assert plan.model.vocab == -(-250880 // (128 * 4)) * 128 * 4


def test_states_of_a_node_are_instances_of_the_optimizer() -> None:
    node, everywhere = run_of(known()["ie-030"]).plan, run_of(known()["ie-029"]).plan
    assert node is not None
    assert everywhere is not None
    assert (node.layout.optimizer_instances, node.shards) == (128, 8)
    assert replace(node, layout=everywhere.layout) == everywhere


def test_other_rows_exactly() -> None:
    hybrid = run_of(known()["hs-001"]).plan
    assert hybrid is not None
    assert (hybrid.strategy, hybrid.fsdp.replicas, hybrid.shards, hybrid.nodes) == ("fsdp-hybrid-shard", 4, 8, 4)
    turns = run_of(known()["titan-014"]).plan
    assert turns is not None
    assert (turns.layout.schedule, turns.layout.chunks, turns.micro_batch, turns.accumulation) == (
        "interleaved",
        2,
        4,
        8,
    )
    assert (turns.compute.compile, turns.compute.float8) == (True, "tensorwise")
    away = run_of(known()["off-003"])
    assert away.plan is not None
    assert (away.plan.offload.optimizer, away.plan.offload.parameters) == ("cpu", "none")
    assert any("only stage 3" in sentence for sentence in away.assumptions)
    lora = run_of(known()["sw-003"]).plan
    assert lora is not None
    assert (lora.adapter.kind, lora.adapter.rank, lora.attention) == ("lora", 8, "eager")
    unnamed = run_of(known()["bs176-013"])
    assert unnamed.plan is not None
    assert (unnamed.plan.model.layers, unnamed.plan.model.heads) == (72, 96)
    assert sum("183B" in sentence or "96 heads" in sentence for sentence in unnamed.assumptions) == 2


@pytest.mark.parametrize(
    ("words", "inside", "between"),
    [
        ("NVLink; 4x100 Gb/s RoCE per node", None, 50e9),
        ("NVLink; 1600 Gb/s RoCE between nodes", None, 200e9),
        ("NVLink; 400 Gb/s RDMA per GPU", None, 400e9),
        ("NVLink (400 GB/s); inter-node not stated", 200e9, None),
        ("NVLink; 4 Omni-Path links per 8-GPU node", None, 50e9),
        ("cloud Ethernet between nodes", None, 12.5e9),
    ],
)
def test_words_for_links(words: str, inside: float | None, between: float | None) -> None:
    found = run_with(interconnect=words, n_gpus="16", strategy="fsdp_full_shard16", global_batch="")
    plain = run_with(interconnect="", n_gpus="16", strategy="fsdp_full_shard16", global_batch="")
    assert found.hardware is not None
    assert plain.hardware is not None
    share = plain.hardware.inside / 300e9  # A100's NVLink in one direction
    assert found.hardware.inside == pytest.approx(share * (inside or 300e9))
    if between is None:
        assert found.hardware.link == plain.hardware.link
    else:
        reached = published()[
            "staged-network-efficiency" if re.search("Omni-Path|Ethernet", words) else "node-efficiency"
        ]
        assert found.hardware.link == pytest.approx(reached * between)
    stated = any("network between nodes is not stated" in sentence for sentence in found.assumptions)
    assert stated is (between is None)


def test_batches_follow_from_each_other() -> None:
    def batch(**cells: str) -> tuple[int, int]:
        plan = plan_of(**cells)
        return plan.micro_batch, plan.accumulation

    assert batch() == (2, 4)
    assert batch(grad_accum="") == (2, 4)
    assert batch(micro_batch_per_gpu="") == (2, 4)
    assert batch(grad_accum="", global_batch="") == (2, 1)
    assert run_with(micro_batch_per_gpu="", grad_accum="", global_batch="").skipped == "micro batch is not stated"


def test_what_cannot_be_said_is_a_reason_and_no_guess() -> None:
    for cells, words in (
        ({"gpu_type": "TPU v5"}, "a card memcalc does not know: TPU v5"),
        ({"gpu_type": ""}, "card is not stated"),
        ({"n_gpus": "4"}, "strategy says 8 ranks, n_gpus says 4"),
        ({"precision": "int3"}, "precision int3"),
        ({"offload": "tape"}, "offload tape"),
        ({"activation_checkpointing": "selective(5 layers)"}, "checkpointing selective(5 layers)"),
        ({"optimizer": "guesswork"}, "optimizer guesswork"),
        ({"model": "Llama-8B"}, None),
        ({"n_params": "8000000000"}, "has 6,738,415,616 parameters here, not 8000000000"),
        ({"model": "pi0 VLA"}, "parts whose shape is not stated"),
        ({"model": ""}, "model is not stated"),
        ({"layers": "", "n_params": ""}, "layers is not stated"),
        ({"seq_len": "1024-4096"}, "seq len is '1024-4096', not one number"),
        ({"strategy": "fsdp_full_shard8+shard4"}, "shards of a part of the ranks"),
        ({"strategy": "zero1+dp8+shard4"}, "divided over a part of the ranks"),
    ):
        found = run_with(**cells)
        assert (found.plan is None) == (words is not None), cells
        if words:
            assert words.replace("8000000000", "8,000,000,000").replace(",", "") in (found.skipped or "").replace(
                ",", ""
            )
            assert found.hardware is None


_CELLS = st.one_of(
    st.sampled_from(sorted({value for row in list(known().values())[::7] for value in row.cells.values()})),
    st.sampled_from(["", "0", "-1", "1e9", "nan", "999999999999999", "3.5", "32+32", "full", "x" * 500, "\u0663", "a+b", "<=512"]),
)  # fmt: skip


@given(st.sampled_from(sorted(known())), st.dictionaries(st.sampled_from(COLUMNS[3:-3]), _CELLS, max_size=4))
@example("bs176-001", {"n_params": "", "layers": "", "n_gpus": "0"})
def test_any_cells_are_a_plan_or_a_reason(name: str, cells: dict[str, str]) -> None:
    row = known()[name]
    found = run_of(replace(row, cells={**row.cells, **cells}))
    assert (found.plan is None) == bool(found.skipped)
    assert (found.plan is None) == (found.hardware is None)
    if found.plan is not None:
        assert isinstance(found.plan, Plan)
        assert found.plan.global_batch > 0


def test_nothing_is_read_from_the_value() -> None:
    row = known()["titan-037"]
    assert run_of(replace(row, measured=1.0, cells={**row.cells, "value": "1"})).plan == run_of(row).plan


def test_every_row_of_the_table_names_a_public_source() -> None:
    for row in known().values():
        assert isinstance(row, Timing)
        assert row.tier in ("A", "B", "C")
        assert len(row.source) > 10
        assert len(row["notes"]) < 80  # numbers and words that are read, no prose


_PICTURES = dict.fromkeys(
    ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "grad_accum", "global_batch"), ""
)


@pytest.mark.parametrize(
    ("cells", "family"),
    [
        ({"model": "resnet50", "n_params": "25557032", "optimizer": "SGD momentum", **_PICTURES}, "resnet"),
        ({"model": "BERT-large", "layers": "24", "hidden": "1024", "heads": "16", "kv_heads": "16", "ffn": "4096",
          "vocab": "30522", "n_params": "336000000", "precision": "fp16 mixed", "optimizer": "LAMB"}, "bert"),
        ({"model": "Falcon-7B", "hidden": "4544", "heads": "71", "kv_heads": "1", "ffn": "18176", "vocab": "65024",
          "n_params": "7217189760"}, "decoder"),
        ({"model": "GPT-2 XL", "layers": "48", "hidden": "1600", "heads": "25", "kv_heads": "25", "ffn": "6400",
          "vocab": "50257", "n_params": "1557611200"}, "gpt2"),
        ({"model": "T5-large", "layers": "24", "hidden": "1024", "heads": "16", "kv_heads": "16", "ffn": "4096",
          "vocab": "32128", "n_params": "737668096"}, "t5"),
        ({"source": "NVIDIA/Megatron-LM README", "strategy": "zero1+dp8"}, "megatron"),
    ],
)  # fmt: skip
def test_names_say_what_blocks_are_made_of(cells: dict[str, str], family: str) -> None:
    plan = plan_of(**cells)
    stated = float(cells.get("n_params", LLAMA["n_params"]))
    assert plan.model.family == family
    assert sum(weight.numel for weight in plan.weights) == pytest.approx(stated, rel=0.06)
    assert (plan.tokens > 0) == (family != "resnet")
