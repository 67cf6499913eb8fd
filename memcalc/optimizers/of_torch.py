"""The optimizers of torch.optim."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from memcalc.optimizers.row import (
    KINDS,
    Held,
    Optimizer,
    Shape,
    Step,
    copies,
    each,
    fullest,
    lists,
    nothing,
    rebound,
    since,
)

__all__ = ["OF_TORCH"]


def _adafactor_states(shape: Shape, itemsize: int) -> list[int]:
    """A row and a column factor for each matrix; vectors are not factored."""
    if len(shape) < 2:
        return [prod(shape) * itemsize]
    return [prod(shape) // shape[-1] * itemsize, prod(shape) // shape[-2] * itemsize]


def _adafactor_foreach(shapes: Sequence[Shape], itemsize: int, version: tuple[int, int]) -> Held:
    """Matrices and vectors are two groups; the first one's updates stay bound while the second one's are made."""
    groups: dict[bool, list[Shape]] = {}
    for shape in shapes:
        groups.setdefault(len(shape) > 1, []).append(shape)
    before: Held = []
    moments: list[Held] = []
    for matrices, group in groups.items():
        updates = [("update", prod(s) * itemsize) for s in group]
        if matrices:
            factors = [_adafactor_states(s, itemsize) for s in group]
            moments += [before + [(f"{part} means", f[i]) for f in factors] for i, part in enumerate(("row", "column"))]
            moments.append([*before, *updates, *(("mean of the row factor", prod(s[:-2]) * itemsize) for s in group)])
        else:
            moments.append(before + updates)
        before = updates
    return fullest(moments)


def _adafactor_loop(shapes: Sequence[Shape], itemsize: int, version: tuple[int, int]) -> Held:
    """Every local variable keeps the last weight's tensor until it is bound again."""
    bound: dict[str, int] = {}
    moments: list[Held] = []
    for shape in shapes:
        size = prod(shape) * itemsize
        if len(shape) > 1:
            bound["row means"], bound["column means"] = _adafactor_states(shape, itemsize)
            mean = [("mean of the row factor", prod(shape[:-2]) * itemsize)]
        else:
            # `grad * grad` is complete before the name lets go of the vector before.
            moments.append([*bound.items(), ("squared gradient", size)])
            bound["squared gradient"] = size
            mean = []
        moments.append([*bound.items(), ("variance estimate", size), *mean])
        bound["update"] = size
    return fullest(moments)


def _asgd_states(shape: Shape, itemsize: int) -> list[int]:
    """The average, and two numbers on the weight's own device."""
    return [4, 4, prod(shape) * itemsize]


def _rprop_foreach(shapes: Sequence[Shape], itemsize: int, version: tuple[int, int]) -> Held:
    """Signs of all weights, and for one weight after the other where they turned and its gradient without those."""
    signs = [("signs", prod(s) * itemsize) for s in shapes]
    largest = max(map(prod, shapes), default=0)
    return [*signs, ("where signs turned", largest), ("gradient without those", largest * itemsize)]


def _muon(shapes: Sequence[Shape], itemsize: int, version: tuple[int, int]) -> Held:
    """Newton-Schulz in bfloat16: the update, its iterate and the next one, and two squares of the shorter side."""
    moments: list[Held] = []
    for shape in shapes:
        side, size = min(shape), prod(shape)
        held = [("update", size * itemsize), ("iterate", 2 * size), *[("square", 2 * side * side)] * 2]
        moments.append([*held, ("next iterate", 2 * size)])  # as large as a third square, or larger
    return fullest(moments)


# torch/optim/adam.py and adamw.py, read in the wheels of 1.12.1, 1.13.1, 2.0.1, 2.1.0, 2.6.0 and 2.13.0. Up to 2.0
# foreach added epsilon out of place, which made a second list; pytorch#104780 and #104898 brought that to one in 2.1.
_ROOT = "root of the second moment"
_ADAM: dict[str, Step] = {
    "foreach": since((2, 1), lists(_ROOT), lists(_ROOT, "denominator")),
    "for-loop": each(_ROOT, "denominator", kept=1),
    "fused": nothing,
}
# In 1.12 alone, AMSGrad's running maximum was a new list as well.
_AMSGRAD: dict[str, Step] = _ADAM | {
    "foreach": since((1, 13), _ADAM["foreach"], lists("maximum", _ROOT, "denominator"))
}
# What Adam's for-loop makes, with the nu of NAdam in place of its root.
_ROOT_OF_SQUARES = "root mean square"

_ADAMW = Optimizer(
    name="adamw",
    summary="Adam with decoupled weight decay",
    library="torch.optim.AdamW",
    states=copies(2),
    steps=_ADAM,
)

OF_TORCH = [
    _ADAMW,
    Optimizer(
        name="adam",
        summary="first and second moment of the gradient",
        library="torch.optim.Adam",
        states=copies(2),
        steps=_ADAM,
        decoupled=False,
        frees_decayed=True,
    ),
    Optimizer(
        name="amsgrad",
        summary="Adam that also keeps the largest second moment",
        library="torch.optim.Adam(amsgrad=True)",
        states=copies(3),
        steps=_AMSGRAD,
        decoupled=False,
        frees_decayed=True,
    ),
    # torch/optim/nadam.py; its product of momenta is a second counter.
    Optimizer(
        name="nadam",
        summary="Adam with Nesterov momentum",
        library="torch.optim.NAdam",
        states=copies(2),
        steps={"foreach": lists(_ROOT), "for-loop": each("corrected second moment", _ROOT, kept=1)},
        counters=2,
        decoupled=False,
    ),
    # torch/optim/radam.py
    Optimizer(
        name="radam",
        summary="Adam with a rectified start",
        library="torch.optim.RAdam",
        states=copies(2),
        steps={
            "foreach": lists(_ROOT),
            "for-loop": each("corrected first moment", "and its step", _ROOT, "reciprocal", "rate"),
        },
        decoupled=False,
        frees_decayed=True,
    ),
    # torch/optim/adamax.py
    Optimizer(
        name="adamax",
        summary="Adam by the largest gradient so far",
        library="torch.optim.Adamax",
        states=copies(2),
        steps={"foreach": lists("absolute gradient"), "for-loop": each("absolute gradient")},
        decoupled=False,
        frees_decayed=True,
    ),
    # torch/optim/adadelta.py
    Optimizer(
        name="adadelta",
        summary="steps in proportion to the root mean square of earlier ones",
        library="torch.optim.Adadelta",
        states=copies(2),
        steps={"foreach": lists(_ROOT_OF_SQUARES, "step"), "for-loop": rebound(_ROOT_OF_SQUARES, "step")},
        decoupled=False,
    ),
    # torch/optim/sgd.py: without weight decay everything happens in place.
    Optimizer(
        name="sgd",
        summary="plain gradient descent",
        library="torch.optim.SGD",
        states=copies(0),
        steps=dict.fromkeys(KINDS, nothing),
        counters=0,
        decoupled=False,
    ),
    Optimizer(
        name="sgd-momentum",
        summary="gradient descent with momentum",
        library="torch.optim.SGD(momentum=0.9)",
        states=copies(1),
        steps=dict.fromkeys(KINDS, nothing),
        counters=0,
        decoupled=False,
    ),
    Optimizer(
        name="sgd-nesterov",
        summary="gradient descent with Nesterov momentum",
        library="torch.optim.SGD(momentum=0.9, nesterov=True)",
        states=copies(1),
        steps={"foreach": nothing, "for-loop": each("gradient ahead"), "fused": nothing},
        counters=0,
        decoupled=False,
    ),
    # torch/optim/asgd.py
    Optimizer(
        name="asgd",
        summary="gradient descent with an average of all weights",
        library="torch.optim.ASGD",
        states=_asgd_states,
        steps={"foreach": lists("decayed gradient"), "for-loop": nothing},
        decoupled=False,
    ),
    # torch/optim/rmsprop.py
    Optimizer(
        name="rmsprop",
        summary="gradient divided by its running root mean square",
        library="torch.optim.RMSprop",
        states=copies(1),
        steps={"foreach": lists(_ROOT_OF_SQUARES), "for-loop": each(_ROOT_OF_SQUARES, kept=1)},
        decoupled=False,
    ),
    Optimizer(
        name="rmsprop-momentum",
        summary="RMSprop with momentum",
        library="torch.optim.RMSprop(momentum=0.9)",
        states=copies(2),
        steps={"foreach": lists(_ROOT_OF_SQUARES), "for-loop": each(_ROOT_OF_SQUARES, kept=1)},
        decoupled=False,
    ),
    Optimizer(
        name="rmsprop-centered",
        summary="RMSprop by the variance of the gradient",
        library="torch.optim.RMSprop(centered=True)",
        states=copies(2),
        steps={"foreach": lists(_ROOT_OF_SQUARES), "for-loop": each("root of the variance", kept=1)},
        decoupled=False,
    ),
    # torch/optim/rprop.py
    Optimizer(
        name="rprop",
        summary="steps by the sign of the gradient alone",
        library="torch.optim.Rprop",
        states=copies(2),
        steps={"foreach": _rprop_foreach, "for-loop": each("sign", "gradient", "its sign")},
    ),
    # torch/optim/adagrad.py; up to 2.0 the quotient was a list of its own (pytorch#104988).
    Optimizer(
        name="adagrad",
        summary="gradient divided by the root of all squares so far",
        library="torch.optim.Adagrad",
        states=copies(1),
        steps={
            "foreach": since((2, 1), lists("root", "numerator"), lists("root", "numerator", "quotient")),
            "for-loop": each("root", kept=1),
            "fused": nothing,
        },
        decoupled=False,
    ),
    # torch/optim/_adafactor.py; foreach is not its default because of its memory (pytorch#132336).
    Optimizer(
        name="adafactor",
        summary="second moment factored into a row and a column, no first moment",
        library="torch.optim.Adafactor",
        states=_adafactor_states,
        # Its in-place powers of norms are refused by DTensor: "requires placement changes", torch 2.13.
        shardable=False,
        steps={"for-loop": _adafactor_loop, "foreach": _adafactor_foreach},
    ),
    # torch/optim/_muon.py; its documentation gives embeddings, heads and vectors to AdamW.
    Optimizer(
        name="muon",
        summary="momentum made orthogonal, for matrices of blocks; AdamW for the rest",
        library="torch.optim.Muon",
        trained=False,
        states=copies(1),
        shardable=False,
        steps={"for-loop": _muon},
        counters=0,
        rest=_ADAMW,
    ),
    # torch/optim/lbfgs.py with history_size=100: so many differences of gradients and of steps, the direction, the
    # last gradient. While it looks for the next direction: the gradient, and two more that are still to be stored.
    Optimizer(
        name="lbfgs",
        summary="quasi-Newton with the last 100 steps",
        library="torch.optim.LBFGS",
        trained=False,
        states=copies(202),
        shardable=False,
        steps={"for-loop": lists("flat gradient", "difference of gradients", "difference of steps")},
        counters=0,
    ),
]
