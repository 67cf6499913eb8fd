"""Which model, which card and which defaults a row means."""

from __future__ import annotations

import pytest

from memcalc.bench.defaults import FRAMEWORKS, framework_of
from memcalc.bench.run import score
from memcalc.bench.words import say
from memcalc.estimate import estimate
from memcalc.hardware import GPUS
from tests.published_rows import LLAMA, MLP, lacks_of, plan_of, row_of


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
    assert compiled.plan.compute.compile
    assert compiled.plan.rms_norm == "fused"
    assert any("counted as eager" in sentence for sentence in compiled.assumptions)
    assert plan_of(LLAMA, source="Lightning-AI/lightning-thunder issue").rms_norm != "fused"


def test_what_would_need_less_leaves_a_peak_in_the_step_as_it_is() -> None:
    notes = "tier A; fused Triton norm"
    step = {"notes": notes, "seq_len": "64"}
    found = score(row_of(**step))
    assert (found.moment, found.skipped) == ("step", None)
    lack = "Triton kernels for norm and rotary positions"
    assert f"{lack}: not counted, the peak is in the step" in found.assumptions
    # What is reserved depends on every moment, and a peak elsewhere on the norm.
    assert score(row_of(**step | {"metric": "max_memory_reserved"})).skipped == lack
    assert score(row_of(notes=notes)).skipped == lack


@pytest.mark.parametrize(
    ("cells", "card", "usable"),
    [
        ({"gpu_type": "A100-SXM4-40GB", "gpu_gib": "40"}, "a100-40gb", ("a100-40gb",)),
        ({"gpu_type": "a100_80gb", "gpu_gib": "80"}, "a100-80gb", ("a100-80gb",)),
        ({"gpu_type": "V100", "gpu_gib": "31.7"}, "v100-32gb", ("v100-32gb",)),
        ({"gpu_type": "A10", "gpu_gib": "24"}, "a10", ("a10",)),
        ({"gpu_type": "GTX 1080 Ti", "gpu_gib": "11"}, "gtx-1080-ti", ("gtx-1080-ti",)),
        ({"gpu_type": "RTX 2080 (11 GB stated)", "gpu_gib": "11"}, "rtx-2080-ti", ("rtx-2080-ti",)),
        # A size with a fraction is a reading, and so is what the message says.
        ({"gpu_type": "H100 (HBM2e 96GB)", "gpu_gib": "95.04"}, "h100-80gb", (95.04, 95.04)),
        ({"gpu_type": "A10", "gpu_gib": "24", "capacity_gib": "23.70"}, "a10", (23.7, 23.7)),
        ({"gpu_type": "a card", "gpu_gib": "", "capacity_gib": "11.76"}, None, (11.76, 11.76)),
        # Cards of the catalog that are sold as 24 GB, from the L4 to the RX 7900 XTX.
        ({"gpu_type": "24 GB card (type not stated)", "gpu_gib": "24"}, None, ("l4", "rx-7900-xtx")),
        ({"gpu_type": "A100 (repo docs)", "gpu_gib": ""}, "a100-80gb", None),
        ({"gpu_type": "a card", "gpu_gib": "3"}, None, None),
        ({"gpu_type": "", "gpu_gib": ""}, None, None),
    ],
)
def test_cards(cells: dict[str, str], card: str | None, usable: tuple[str | float, ...] | None) -> None:
    said = say(row_of(**cells))
    assert said.plan is not None
    assert said.plan.gpu == card
    sizes = [GPUS[size].usable_bytes if isinstance(size, str) else round(size * 2**30) for size in usable or ()]
    assert said.usable == ((sizes[0], sizes[-1]) if sizes else None)
    boundary = {"metric": "fits", "value_gib": ""}
    assert bool(lacks_of(**cells | boundary)) is (usable is None)
