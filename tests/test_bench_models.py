"""Which model, which card and which defaults a row means."""

from __future__ import annotations

import dataclasses

import pytest

from memcalc.bench.defaults import FRAMEWORKS, framework_of
from memcalc.bench.run import score
from memcalc.bench.words import say
from memcalc.estimate import estimate
from memcalc.hardware import GPUS
from memcalc.models import FAMILIES, MODELS
from tests.published_rows import LLAMA, MLP, lacks_of, plan_of, row_of


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("DeBERTa-v2-xlarge", "relatives of BERT"),
        ("mt0-xxl (12B)", "relatives of T5"),
        ("torchvision vgg16", "convolutional nets"),
        ("Swin-T 224", "vision transformers"),
        ("granite-3.0-3b-a800m-instruct (MoE)", "this Mixture of Experts"),
        ("Megatron HYBRID layers h1024", "Megatron's GPT layers"),
        ("gemma-3-4b-it", "newer Gemma layers"),
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
    assert lacks_of(n_params="124000000") == [
        "model family: gpt2 (gpt2) has 124,439,808 parameters here, not 124,000,000"
    ]
    assert (plan_of(seq_len="512").tokens, plan_of(seq_len="512").model.context) == (512, 1024)
    tied = str(6738415616 - 32000 * 4096)
    assert (plan_of(LLAMA, n_params=tied).model.tied, plan_of(LLAMA).model.tied) == (True, False)
    assert plan_of(LLAMA, n_params="").model.layers == 32
    assert lacks_of(layers="999999999999") == ["layers 999999999999 is no number of layers"]


def shapes_of(name: str, **cells: str) -> dict[str, str]:
    """The cells of a named model of the catalog, under another name."""
    model = MODELS[name]
    numbers = {field: str(getattr(model, field)) for field in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")}
    count = sum(weight.numel for weight in FAMILIES[model.family].weights(model))
    return {
        **numbers,
        "n_params": str(count),
        "seq_len": "512",
        "param_dtype": "bf16",
        "compute_dtype": "bf16",
        **cells,
    }


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"), ("Qwen2.5-0.5B", "qwen2.5-0.5b"), ("Qwen3-0.6B", "qwen3-0.6b"),
        ("gemma-2b", "gemma-2b"), ("Gemma-2-27b", "gemma-2-27b"), ("gemma-2b", "gemma-2-2b"), ("PowerLM-3b", "powerlm-3b"),
        ("EleutherAI pythia-2.8b", "pythia-2.8b"), ("phi-2", "phi-2"), ("Falcon 40 B", "falcon-40b"),
        ("falcon-7b", "falcon-7b"), ("GPT-J-6B", "gpt-j-6b"), ("OPT-1.3b", "opt-1.3b"), ("BLOOM-7b1", "bloom-7b1"),
        ("MPT-7B", "mpt-7b"), ("StarCoder 15.5B", "starcoder"), ("Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("llama-3.2-1b", "llama-3.2-1b"), ("Phi-3-mini-4k-instruct", "phi-3-mini"),
    ],
)  # fmt: skip
def test_names_of_relatives(text: str, name: str) -> None:
    """The row's own model is the catalog's, but for its name, how long it may read, and what no count can tell."""
    found, model = plan_of(model=text, **shapes_of(name)).model, MODELS[name]
    assert dataclasses.replace(found, name=name, context=model.context, fused_qkv=model.fused_qkv) == model
    wrong = shapes_of(name)
    assert "parameters here" in lacks_of(model=text, **wrong | {"n_params": str(int(wrong["n_params"]) + 1)})[0]


def test_litgpt_has_one_product_for_queries_keys_and_values_and_a_head_of_its_own() -> None:
    cells = shapes_of("qwen2.5-0.5b", model="Qwen2.5-0.5B", source="Lightning-AI/litgpt extensions/thunder")
    model = plan_of(**cells).model
    assert (model.fused_qkv, model.tied) == (True, False)
    compiled = plan_of(**cells, compile="yes").model
    assert (compiled.fused_qkv, compiled.tied) == (False, False)


def test_frameworks_write_their_layers_in_their_own_way() -> None:
    def forms(source: str, **cells: str) -> dict[str, str]:
        found = dataclasses.asdict(plan_of(LLAMA, source=source, **cells).implementation)
        return {field: value for field, value in found.items() if value != "auto"}

    hub = "huggingface/transformers docs"
    assert forms(hub) == {"norm": "python", "grouped": "repeat", "softmax": "float32"}
    assert forms(hub, attention="flash") == {"norm": "python", "softmax": "float32"}
    assert forms(hub, notes="tier A; fused Triton RMSNorm/RoPE/cross-entropy") == {"norm": "fused", "rotary": "kernel"}
    assert forms("pytorch/torchtitan PR #165") == {"norm": "python", "grouped": "repeat", "rotary": "complex"}
    assert forms("pytorch/torchtitan PR #165", compile="yes") == {}


@pytest.mark.parametrize(
    ("text", "name", "softmax", "dropout"),
    [("StarCoder 15.5B", "starcoder", "scripted", 0.1), ("OPT-1.3b", "opt-1.3b", "clamped", 0.0)],
)
def test_transformers_writes_some_models_in_a_way_of_their_own(
    text: str, name: str, softmax: str, dropout: float
) -> None:
    plan = plan_of(model=text, source="huggingface/transformers docs", **shapes_of(name))
    assert (plan.implementation.softmax, plan.dropout) == (softmax, dropout)
    assert plan_of(model=text, source="Lightning-AI/litgpt", **shapes_of(name)).implementation.softmax == "auto"


def test_gradients_stay_where_zero_grad_keeps_them() -> None:
    assert not plan_of(source="huggingface/transformers docs/source/performance.mdx").set_to_none
    assert plan_of(source="huggingface/transformers docs").set_to_none


def test_a_bert_that_classifies() -> None:
    cells = {"model": "bert-large-uncased (seq-cls)", "layers": "24", "hidden": "1024", "heads": "16", "ffn": "4096",
             "vocab": "", "n_params": "335143938", "attention": "eager", "seq_len": "512"}  # fmt: skip
    plan = plan_of(**cells, source="huggingface/transformers docs")
    assert (plan.model.classes, plan.dropout, estimate(plan).parameters) == (2, 0.1, 335143938)


def test_images() -> None:
    vit = {"model": "timm vit_huge_patch14_224.orig_in21k (ViT-H/14), 45 classes", "layers": "32", "hidden": "1280",
           "heads": "16", "ffn": "5120", "vocab": "", "n_params": "630822445"}  # fmt: skip
    assert estimate(plan_of(**vit)).parameters == 630822445
    clips = {"model": "TSN ResNet50", "vocab": "", "n_params": "", "micro_batch_per_gpu": "16",
             "notes": "tier A; config tsn_r50_1x1x6_100e_mit_rgb; input per GPU 16 videos x 6 segments x 1 frames"}  # fmt: skip
    plan = plan_of(**clips)
    assert (plan.micro_batch, plan.model.classes) == (96, 339)
    notes = "tier B; config tsn_r50_320p_1x1x3_110e_kinetics400_flow; input per GPU 32 videos x 3 segments x 5 frames"
    flow = {"model": "TSN ResNet50 optical flow input", "micro_batch_per_gpu": "32", "notes": notes}
    plan = plan_of(**clips | flow)
    assert (plan.micro_batch, plan.model.channels, plan.model.features) == (96, 10, 10 * 224 * 224)


def test_a_stack_of_linear_layers_ends_in_its_head() -> None:
    plan = plan_of(model="20 x Linear(2000,2000) MLP", n_params="80040000", vocab="", seq_len="1")
    assert (plan.model.activation, estimate(plan).parameters) == ("identity", 80_040_000)


@pytest.mark.parametrize(
    ("text", "metric", "tokens"),
    [
        ("128 src / 128 tgt", "max_memory_allocated", 128),
        ("<=128 src / <=128 tgt", "fits", 128),
        ("<=128 src / <=128 tgt", "max_memory_allocated", 0),
        ("128 src / 64 tgt", "fits", 0),
    ],
)
def test_both_sides_of_a_t5(text: str, metric: str, tokens: int) -> None:
    cells = {"model": "T5-large", "layers": "24 enc + 24 dec", "hidden": "1024", "heads": "16", "ffn": "4096",
             "vocab": "32128", "n_params": "737668096", "attention": "eager"}  # fmt: skip
    measured = {"value_gib": ""} if metric == "fits" else {}
    row = {**cells, "seq_len": text, "metric": metric, "gpu_type": "A100", "gpu_gib": "80", **measured}
    if tokens:
        assert plan_of(**row).tokens == tokens
    else:
        assert any("not one number" in lack for lack in lacks_of(**row))


def test_the_width_of_an_mlp_is_that_of_its_input() -> None:
    plan = plan_of(**MLP)
    assert (plan.model.hidden, plan.model.features, plan.model.classes, plan.model.layers) == (1565, 1565, 273, 2)
    assert estimate(plan).parameters == 5329098


@pytest.mark.parametrize(
    ("name", "size", "widths"),
    [
        ("input:3988_output:442_depth:7_arch:pyramid_batch:756_act:tanh_dropout:0.13_dropout:False_batchnorm:True",
         "11454381", (1994, 997, 498, 442, 442, 442, 442)),
        ("input:3958_output:778_depth:10_arch:uniform_batch:688_act:leaky_relu_dropout:0.47_dropout:True_batchnorm:True",
         "159856482", (3958,) * 10),
    ],
)  # fmt: skip
def test_mlps_of_other_kinds(name: str, size: str, widths: tuple[int, ...]) -> None:
    plan = plan_of(**MLP | {"model": f"MLP {name}", "n_params": size})
    assert plan.model.widths == widths
    assert plan.model.batch_norm
    assert plan.dropout == (0.47 if "dropout:True" in name else 0)


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ("tanh", "prelu", "an MLP with prelu, which has weights of its own"),
        ("uniform", "round", "an MLP of round widths"),
        ("output:273", "output:274", "an MLP of uniform widths has 5,330,664 parameters here, not 5,329,098"),
        ("depth:2", "depth:1", "an MLP of uniform widths has 2,878,308 parameters here, not 5,329,098"),
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
    assert plan_of(LLAMA, source="Lightning-AI/lightning-thunder issue").rms_norm == "chain"


def test_what_would_need_less_leaves_a_peak_in_the_step_as_it_is() -> None:
    fewer = {"activation_checkpointing": "selective(attn)"}
    found = score(row_of(**fewer, seq_len="64"))
    assert (found.moment, found.skipped) == ("step", None)
    lack = "selective activation checkpointing"
    assert f"{lack}: not counted, the peak is in the step" in found.assumptions
    # What is reserved depends on every moment, and a peak elsewhere on the activations.
    assert score(row_of(**fewer, seq_len="64", metric="max_memory_reserved")).skipped == lack
    assert score(row_of(**fewer)).skipped == lack


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
