"""The query of an address says a plan in the words of the command line: ``model=gpt2&batch-size=8&adam=``.

An address must not do what a person has to ask for at a terminal. So of the options only those of a plan are open, and
none of these that names a file, runs code, or starts something. A model is one of the catalog, or the JSON of a
config.json that comes with the request, and is parsed as such a file is.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import parse_qsl

import click

from memcalc.adapters import usual_dtype
from memcalc.cli.options import build_plan, check_effect, plan_options
from memcalc.cli.unsaid import unsaid_nodes
from memcalc.errors import InputError, UnknownNameError, shorten
from memcalc.files import read_json
from memcalc.groups import Group
from memcalc.hf.reading import of_config
from memcalc.hf.record import HfModel
from memcalc.models import MODELS
from memcalc.plan import Plan

__all__ = ["CLOSED", "Asked", "OwnConfig", "asked", "plan_of", "query_of"]

CLOSED = ("module", "sample", "wrap", "module_timeout")
"""Options of a plan that name code of the user's, which no address may have run."""

SEARCH = ("global_batch", "allow_pure_16bit", "top", "max_gpus", "only", "without", "keep_free", "train_tokens")
"""Options of ``memcalc recommend`` that are open beside those of a plan, where it has them."""

MOST = 100
"""Options in one query; there are about as many in all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnConfig:
    """A config.json that came with the request: its text, and the name that its folder would have."""

    name: str
    text: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}", self.name):
            raise InputError(f"the name {shorten(self.name)} may have letters, digits, dots and dashes, 60 at most")

    @property
    def path(self) -> str:
        """Where the command line would find it."""
        return f"{self.name}/config.json"

    def read(self) -> HfModel:
        """The model. Raises FileError and InputError."""
        found = read_json(self.text, self.path)
        if not isinstance(found, dict):
            raise InputError(f"{self.path}: expected an object as a config.json is one, found {shorten(found)}")
        return of_config(found, self.path, self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A query that was understood."""

    arguments: tuple[str, ...]
    """As they would stand after ``memcalc COMMAND``."""
    words: Mapping[str, Any]
    """By the names of the command's parameters."""

    def command(self, name: str) -> str:
        """The line for a shell."""
        return shlex.join(["memcalc", name, *self.arguments])


@cache
def _probe() -> click.Command:
    """A command with the options of a plan and nothing else."""
    return click.command("plan")(plan_options(lambda **words: None))


def _open(command: click.Command) -> dict[str, click.Option]:
    """Options that a query may have, by their name without the dashes."""
    plan = {param.name for param in _probe().params} - set(CLOSED)
    found = {}
    for param in command.params:
        if isinstance(param, click.Option) and param.name in {*plan, *SEARCH}:
            found.update({name.removeprefix("--"): param for name in param.opts})
    return found


def asked(query: str, command: click.Command | None = None, config: OwnConfig | None = None) -> Asked:
    """What a query says, for one command or for a plan alone. Raises InputError.

    >>> asked("model=gpt2&batch-size=8&adam=").command("estimate")
    'memcalc estimate gpt2 --batch-size 8 --adam'
    >>> asked("model=gpt2&batch-size=8").words["micro_batch"]
    8
    """
    command = command or _probe()
    known = _open(command)
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=MOST)
    except ValueError:
        raise InputError(f"this query cannot be read: it is no UTF-8 text, or has more than {MOST} options") from None
    model = [config.path] if config is not None else []
    options: list[tuple[str, ...]] = []
    said: set[str | None] = set()
    for name, value in pairs:
        if name == "model":
            if model:
                raise InputError("the model is said twice; leave one out")
            model = [MODELS[value].name]
        elif name not in known:
            raise UnknownNameError("option", name, {param.opts[0].removeprefix("--") for param in known.values()})
        elif known[name].name in said:
            raise InputError(f"--{name} is said twice; leave one out")
        elif not known[name].is_flag:
            options.append((f"--{name}", value))
        elif value:
            raise InputError(f"--{name} {shorten(value)} is one word too much: --{name} is on or left out")
        else:
            options.append((f"--{name}",))
        said.add(known[name].name if name in known else None)
    # A value that begins with a dash is still a value.
    parsed = [*(model if config is None else []), *map("=".join, options)]
    words = dict(command.make_context(command.name or "", parsed).params)
    if config is not None:
        words["model"] = config.read()
    return Asked(arguments=(*model, *(word for option in options for word in option)), words=words)


def plan_of(found: Asked) -> Plan:
    """The plan that ``memcalc estimate`` makes of these words. Raises InputError."""
    names = {param.name for param in _probe().params}
    words = {name: value for name, value in found.words.items() if name in names}
    plan = build_plan(words)
    check_effect(words, plan)
    return plan


def query_of(plan: Plan, model: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The options that say a plan, after those that say its ``model``: what is not as it would be unsaid.

    >>> plan = plan_of(asked("model=gpt2&gpus=8&strategy=fsdp-full-shard&checkpointing=full"))
    >>> query_of(plan, [("model", "gpt2")])[4:]
    [('checkpointing', 'full'), ('strategy', 'fsdp-full-shard'), ('gpus', '8')]
    """
    usual = _values(Plan(model=plan.model, micro_batch=1, tokens=plan.tokens))
    usual["nodes"] = unsaid_nodes(plan.strategy_row, plan.device, plan.ranks, plan.gpu)
    usual["adapter__dtype"] = usual_dtype(plan.adapter.kind, plan.strategy_row.engine)
    values, said = _values(plan), list(model)
    always = {"optimizer_kind", "micro_batch", "tokens", *(["strategy"] if plan.ranks > 1 else [])}
    for param in _probe().params:
        name, value = str(param.name), values.get(str(param.name))
        if value is not None and (value != usual[name] or (name in always and value)):
            said.append((param.opts[0].removeprefix("--"), _text(name, value)))
    return said


def _values(plan: Plan) -> dict[str, Any]:
    """Fields of a plan and of its groups by the names of their options' parameters; the model is none of them."""
    found: dict[str, Any] = {"keep_gradients": not plan.set_to_none}
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, Group):
            found |= {f"{field.name}__{knob.name}": getattr(value, knob.name) for knob in dataclasses.fields(value)}  # type: ignore[arg-type]
        elif field.name != "model":
            found[field.name] = value
    return found


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return ""
    if name == "checkpoint_every":
        return ("none", "full")[value] if value < 2 else f"every-{value}"
    return str(value)
