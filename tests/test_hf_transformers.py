"""Every model type against the module that transformers builds of the same config on the meta device: names and shapes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memcalc.hf.reading import of_config
from memcalc.hf.rows import TYPES
from tests.drawn_configs import configs
from tests.sized_configs import ROWS, SIZED, TOKENS, kept, sized

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

# phi-msft is the name of a repository's own code, which is never run.
NAMES = sorted(name for name in TYPES if name != "phi-msft")
EXAMPLES = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def parameters(config: dict[str, Any], architecture: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of transformers' own module, without memory."""
    built = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    with torch.device("meta"):
        module = getattr(transformers, architecture)(built)
    return {name: tuple(each.shape) for name, each in module.named_parameters()}


@pytest.mark.parametrize("model_type", NAMES)
@EXAMPLES
@given(data=st.data())
def test_names_and_shapes_are_those_of_transformers(model_type: str, data: st.DataObject) -> None:
    config = data.draw(configs(model_type))
    read = of_config(config, "config.json", "drawn")
    ours = read.weights()
    assert len(dict(ours)) == len(ours)
    assert dict(ours) == parameters(config, read.head)
    assert sum(torch.Size(shape).numel() for _, shape in ours) == read.parameters


def saved(config: dict[str, Any], architecture: str, attention: str, dtype: Any) -> int:
    """Bytes that autograd keeps of a forward pass of transformers' module, its output among them."""
    built = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    built._attn_implementation = attention
    module = getattr(transformers, architecture)(built).to(dtype).train()
    held = [*module.parameters(), *module.buffers()]
    own = {each.untyped_storage().data_ptr() for each in held}
    found: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage  # which also keeps another from being put in its place
        return tensor

    ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = module(ids, use_cache=False).logits
    found[logits.untyped_storage().data_ptr()] = logits.untyped_storage()
    return sum(storage.nbytes() for storage in found.values()) - ids.untyped_storage().nbytes()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
# Of the others a whole step is measured in tests/trainers/test_hf_measured.py.
@pytest.mark.parametrize("model_type", SIZED)
def test_kept_activations_are_those_of_transformers(model_type: str, attention: str, precision: str) -> None:
    """Within 1 %: what is not told apart are tables of rotary positions and a few bytes a token."""
    if attention == "sdpa" and model_type in ("bloom", "gemma2", "gpt_neo", "falcon", "mpt"):
        pytest.skip("transformers has no such form, or another kernel than auto takes (see the notes of falcon)")
    if attention == "eager" and precision == "bf16" and model_type in ("gptj", "gpt_neo"):
        pytest.skip("transformers has float32 copies of queries and keys there, as the notes of both say")
    read = of_config(sized(model_type), "config.json", "sized")
    theirs = saved(sized(model_type), read.head, attention, torch.float32 if precision == "fp32" else torch.bfloat16)
    ours = kept(read, attention, precision)
    assert ours == pytest.approx(theirs, rel=0.01)
