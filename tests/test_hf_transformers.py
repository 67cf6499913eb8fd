"""Every model type against the module that transformers builds of the same config on the meta device: names and shapes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memcalc.hf.reading import of_config
from memcalc.hf.rows import TYPES
from tests.drawn_configs import configs

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
