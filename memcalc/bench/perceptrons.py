"""The MLPs of a measuring campaign, whose names say their shape."""

from __future__ import annotations

import re

from memcalc.bench.reading import Reading
from memcalc.models import FAMILIES
from memcalc.spec import Model

__all__ = ["dropout_of", "perceptron"]

_MLP = re.compile(
    r"MLP input:(\d{1,9})_output:(\d{1,9})_depth:([1-9]\d{0,3})_arch:(\w+?)_batch:\d+_act:(\w+)"
    r"_dropout:([\d.]+)_dropout:(\w+)_batchnorm:(\w+)"
)
_STACK = re.compile(r"(\d{1,4}) x Linear\((\d{1,6}),\2\)")
_ACTIVATIONS = {"swish": "silu"}


def perceptron(reading: Reading) -> Model | None:
    """Widths follow from the architecture (GPUMemNet, mlp_next.py), and the parameter count confirms them."""
    if stack := _STACK.match(reading.row["model"]):
        return _stack(reading, int(stack[1]), int(stack[2]))
    match = _MLP.fullmatch(reading.row["model"])
    size = reading.number("n_params")
    if match is None or not size:
        reading.lack(f"model {reading.row['model']!r} cannot be read")
        return None
    features, classes, depth = (int(match[i]) for i in (1, 2, 3))
    widths = _widths(match[4], features, classes, depth)
    if not widths:
        reading.lack(f"model family: an MLP of {match[4]} widths")
        return None
    activation = _ACTIVATIONS.get(match[5], match[5])
    if activation == "prelu":
        reading.lack("model family: an MLP with prelu, which has weights of its own")
        return None
    built = Model(
        name="mlp", family="mlp", layers=len(widths), hidden=widths[0], features=features, classes=classes, widths=widths,
        activation=activation, batch_norm=match[8] == "True",
    )  # fmt: skip
    counted = sum(weight.numel for weight in FAMILIES["mlp"].weights(built))
    if counted != size:
        reading.lack(f"model family: an MLP of {match[4]} widths has {counted:,} parameters here, not {size:,}")
    return built


def _stack(reading: Reading, layers: int, width: int) -> Model:
    """Linear layers and nothing between them (pytorch/tutorials, zero_redundancy_optimizer): the last is the head."""
    reading.assume("the loss is counted as cross-entropy")
    built = Model(
        name="mlp", family="mlp", layers=layers - 1, hidden=width, features=width, classes=width, activation="identity"
    )  # fmt: skip
    counted, size = sum(weight.numel for weight in FAMILIES["mlp"].weights(built)), reading.number("n_params")
    if counted != size:
        reading.lack(f"model family: {layers} layers of {width} have {counted:,} parameters, not {size:,}")
    return built


def dropout_of(name: str) -> float:
    """The probability a name states, where it says that there is dropout.

    >>> dropout_of("MLP input:2_output:1_depth:1_arch:uniform_batch:1_act:relu_dropout:0.25_dropout:True_batchnorm:False")
    0.25
    """
    match = _MLP.fullmatch(name)
    return float(match[6]) if match and match[7] == "True" else 0.0


def _widths(kind: str, features: int, classes: int, depth: int) -> tuple[int, ...]:
    """
    >>> _widths("pyramid", 100, 30, 3), _widths("gradual", 100, 10, 3)
    ((50, 30, 30), (70, 40, 10))
    """
    if kind == "uniform":
        return (features,) * depth
    found: list[int] = []
    width = features
    if kind in ("pyramid", "bottleneck"):
        for _ in range(depth + (kind == "bottleneck")):
            width = max(width // 2, classes)
            found.append(width)
    elif kind == "gradual":
        step = (features - classes) // depth
        for _ in range(depth):
            width = max(width - step, classes)
            found.append(width)
    return tuple(found)
