"""What a module of the user's own is: ``python -m trainers.module --factory package.file:name --result FILE``.

Builds it without memory where its code allows that, counts it, and sends one batch of sizes through it. What comes out
is a Model as JSON, or one line that says what went wrong; ``memcalc/module.py`` starts this and reads it.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
import traceback
import warnings
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

from memcalc.errors import FileError, InputError, MemcalcError
from memcalc.models import Model, Module, Weight
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from trainers.blocks import candidates, group_of, unit_names
from trainers.factories import CodeError, build_for_real, build_on_meta, retie, shared
from trainers.models.module import call as forward
from trainers.models.module import loss_kind, own_loss, scores
from trainers.module_batches import tensors, zeros
from trainers.rehearsal.run import STEPS, rehearse
from trainers.rehearsal.tracer import Tracer

__all__ = ["describe", "main"]

_PROBED = 2  # samples: one alone would hide a batch dimension that is squeezed away


def describe(factory: str, *, sample: str, wrap: str, shape: tuple[int, ...], tokens: int) -> Model:
    """Count a module and find out how it is called. Raises MemcalcError."""
    module = build_on_meta(factory)
    units = unit_names(module, wrap)
    notes = []
    if factory.endswith(".json"):
        notes.append("its model_type is one that only transformers knows; it is counted as transformers builds it")
    if not units and (kinds := candidates(module)):
        many = [f"{name} ({count})" for name, count in sorted(kinds.items(), key=lambda item: -item[1])[:6]]
        notes.append(
            f"no blocks were found (no _no_split_modules, no nn.ModuleList), so that all is one unit; --wrap CLASS names "
            f"them: {', '.join(many)}"
        )
    if any(isinstance(part, nn.LSTM) for part in module.modules()):
        notes.append(
            "nn.LSTM: on the CPU oneDNN's scratch memory is measured on one layer of its sizes; on CUDA cuDNN alone says what it "
            "keeps, here it is every gate"
        )
    weights = tuple(_weight(name, parameter, units) for name, parameter in module.named_parameters())
    if not any(weight.trainable for weight in weights):
        raise InputError(f"{factory} has no weight that is trained ({len(weights)} are frozen)")
    rows = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    arguments = _arguments(module, tokens, shape) if not sample else ()
    model = Model(
        name=factory.rpartition("/")[2],
        family="token-module" if tokens else "module",
        layers=len(dict.fromkeys(weight.group for weight in weights if "." in weight.group)),
        context=tokens,
        features=prod(shape) if shape else 0,
        vocab=max(rows, default=0),
        module=Module(
            factory=factory, sample=sample, wrap=wrap, shape=shape, weights=weights, arguments=arguments,
            buffers=tuple(_weight(name, buffer, []) for name, buffer in module.named_buffers()),
        ),
    )  # fmt: skip
    if not (sample or shape or tokens):
        notes.append("activations are not counted: give --input-shape, --seq-len or --sample")
        return replace(model, notes=tuple(notes))
    return _probed(replace(model, notes=tuple(notes)), module)


def _weight(name: str, tensor: Tensor, units: list[str]) -> Weight:
    dtype = str(tensor.dtype).removeprefix("torch.")
    group, trainable = group_of(name, units), tensor.requires_grad
    if dtype not in DTYPE_BYTES:
        if trainable:
            raise InputError(f"{name} is {dtype}; memcalc trains {', '.join(DTYPE_BYTES)[:26]}")
        return Weight(name, (tensor.numel() * tensor.element_size(),), group, False, "uint8")
    return Weight(name, tuple(tensor.shape), group, trainable, "" if dtype == "float32" else dtype)


def _arguments(module: nn.Module, tokens: int, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Names under which a module takes inputs and targets, where it takes targets: as models of transformers do."""
    known = inspect.signature(module.forward).parameters
    first = "input_ids" if tokens else "pixel_values"
    return (first, "labels") if first in known and "labels" in known else ()


def _probed(model: Model, module: nn.Module) -> Model:
    """With what a forward pass of sizes alone shows: the kind of loss, the classes, the size of a sample."""
    own = model.module
    plan = Plan(model=model, tokens=model.context if model.family == "token-module" else 0, micro_batch=_PROBED)
    try:
        with Tracer("cpu", 0).running(), torch.no_grad():
            ties = shared(module)
            module.to_empty(device="cpu")
            retie(module, ties)
            inputs, targets = zeros(plan, _PROBED, torch.device("cpu"))
            output = forward(module.train(), inputs)
    except MemcalcError:
        raise
    except Exception as error:
        traceback.print_exc()
        line = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0][:160]}"
        if isinstance(again := _tried(plan, module), type(error)):
            text = str(again).strip().split("\n")[0][:160]
            raise CodeError(f"forward of {own.factory} raised {type(again).__name__}: {text}") from None
        return replace(model, notes=(*model.notes, f"its forward pass cannot be followed by sizes alone ({line})"))
    if own.sample:
        held = sum(tensor.numel() for tensor in tensors(inputs) if tensor.ndim)
        model = replace(model, features=held // _PROBED)
    if own_loss(output) is not None:
        return replace(model, module=replace(own, loss="own"))
    made = scores(output)
    classes = made.shape[1] if made.ndim == 2 and not own.sample else 0
    if classes and model.family == "token-module":
        targets = made.new_zeros(_PROBED, dtype=torch.int64)
    kind = loss_kind(made, targets)
    return replace(
        model,
        classes=classes,
        vocab=min(model.vocab or made.shape[-1], made.shape[-1])
        if model.family == "token-module" and not classes
        else model.vocab,
        notes=(*model.notes, f"the loss is {_WORDS[kind]}, because the module returns none"),
        module=replace(own, loss=kind),
    )


def _tried(plan: Plan, module: nn.Module) -> Exception | None:
    """What the module's forward pass raises on real numbers, too; None where it does not, or could not be tried."""
    held = sum(part.numel() * part.element_size() for part in (*module.parameters(), *module.buffers()))
    if held > os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2:
        return None
    try:
        real, (inputs, _) = build_for_real(plan.model.module.factory, 0), zeros(plan, _PROBED, torch.device("cpu"))
    except MemcalcError:  # said where it is built, if it matters
        return None
    try:
        with torch.no_grad():
            forward(real.train(), inputs)
    except Exception as error:
        traceback.print_exc()
        return error
    return None


_WORDS = {
    "cross-entropy": "the cross-entropy of its output",
    "mean-square": "the mean square of output and targets",
    "mean-square of the output": "the mean square of its output, for want of targets of its shape",
}


def rehearsed(path: Path, rank: int, device: str) -> dict[str, Any]:
    """What the module's own code takes in the plan of a file, on one rank."""
    plan = Plan.load(path)
    tracer = Tracer(plan.device, STEPS - 1)
    with warnings.catch_warnings(), tracer.host:
        warnings.simplefilter("ignore")  # of what torch's own code does with tensors that have no values
        found = rehearse(plan, rank=rank, device=device, tracer=tracer)
    return {
        "measurement": found.to_json(),
        "guessed": tracer.guessed,
        "grown": tracer.grown,
        "hosted": tracer.host_bytes,
    }


@click.command()
@click.option("--factory", default="")
@click.option("--sample", default="")
@click.option("--wrap", default="")
@click.option("--shape", default="[]")
@click.option("--tokens", type=int, default=0)
@click.option("--rehearse", "planned", type=click.Path(path_type=Path), help="A plan to rehearse instead.")
@click.option("--rank", type=int, default=0)
@click.option("--device", default="fake")
@click.option("--result", type=click.Path(path_type=Path), required=True)
def main(
    factory: str,
    sample: str,
    wrap: str,
    shape: str,
    tokens: int,
    planned: Path | None,
    rank: int,
    device: str,
    result: Path,
) -> None:
    """Leave a Model as JSON in RESULT, or a rehearsal, or the one line of an error."""
    found: dict[str, Any]
    try:
        if planned is not None:
            found = rehearsed(planned, rank, device)
        else:
            model = describe(factory, sample=sample, wrap=wrap, shape=tuple(json.loads(shape)), tokens=tokens)
            found = dataclasses.asdict(model)
    except MemcalcError as error:
        kind = "file" if isinstance(error, FileError) else "input"
        found = {"error": str(error), "kind": kind, "traceback": isinstance(error, CodeError)}
    except BaseException as error:
        traceback.print_exc()
        line = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0][:160]}"
        found = {"error": line if planned else f"{factory}: {line}", "kind": "input", "traceback": True}
    temporary = result.with_suffix(".part")
    temporary.write_text(json.dumps(found), encoding="utf-8")
    temporary.replace(result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads and exit handlers of the user's code have no say any more


if __name__ == "__main__":
    main()
