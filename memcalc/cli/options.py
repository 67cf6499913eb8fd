"""The options that say a plan in words, shared by the commands, and the plan they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any, TypeVar

import click

from memcalc.adapters import usual_dtype
from memcalc.cli.kinds import Bytes, Checkpointing, Count, ModelName, Name, Number, Shape, Whole
from memcalc.cli.models import Words, build_model, given, said_by_file
from memcalc.cli.unsaid import unsaid_nodes
from memcalc.errors import InputError
from memcalc.groups import Group
from memcalc.hardware import GPUS
from memcalc.implementation import Implementation
from memcalc.models import FAMILIES, MODELS, Model
from memcalc.optimizers import KINDS, OPTIMIZERS
from memcalc.plan import Plan
from memcalc.precision import PRECISIONS
from memcalc.sound import ATTENTIONS, DEVICES, LOSSES, MOST_RANKS
from memcalc.strategies import STRATEGIES

__all__ = [
    "Command", "Words", "beside_options", "build_model", "build_plan", "check_effect", "given", "of_group", "option", "plan_options",
    "said_by_file", "several", "training_tokens",
]  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])

_PLAN = (
    "strategy", "ranks", "nodes", "precision", "optimizer", "optimizer_kind", "micro_batch", "accumulation", "tokens",
    "checkpoint_every", "reentrant", "attention", "dropout", "loss_dtype", "keep_logits", "bucket_mb", "bucket_views", "static_graph", "device", "gpu", "torch",
    "allocator",
)  # fmt: skip


class Option(click.Option):
    """An option that stands under a heading in ``--help``."""

    def __init__(self, *args: Any, section: str = "Options", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.section = section


class Command(click.Command):
    """A command whose ``--help`` lists its options under their headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record:
                sections.setdefault(getattr(param, "section", "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def option(section: str, *names: str, **settings: Any) -> Callable[[Function], Function]:
    """``click.option`` under a heading."""
    return click.option(*names, cls=Option, section=section, **settings)


def _one_of(known: Any) -> str:
    return f"One of: {', '.join(known)}."


def _meanings(summaries: Mapping[str, str]) -> str:
    """A name and its meaning to a line, cut for a terminal of 80 columns: click leaves text after \\b as it is."""
    lines = (fill(f"{name}: {said}.", 45, subsequent_indent="  ") for name, said in summaries.items())
    return "\n".join(["\b", *lines])


def _flag(section: str, name: str, help: str) -> Callable[[Function], Function]:
    return option(section, name, is_flag=True, default=None, help=help)


def _whole(section: str, *names: str, help: str) -> Callable[[Function], Function]:
    return option(section, *names, type=Whole(), metavar="N", help=help)


_M, _T, _W = "The model", "The training", "Where it runs"
_OPTIONS = (
    click.argument("model", required=False, type=ModelName("model", MODELS)),
    option(_M, "--params", "parameters", type=Count(), metavar="COUNT", help="A model known by its size: 1e9, 7b, 124M."),
    _whole(_M, "--layers", help="Blocks (with --params: layers)."),
    _whole(_M, "--hidden", help="Width; --ffn follows where it is 4 times it."),
    _whole(_M, "--heads", help="Attention heads."),
    _whole(_M, "--kv-heads", help="Key/value heads; they follow --heads where the model has as many."),
    _whole(_M, "--ffn", help="Width inside a block's MLP."),
    _whole(_M, "--vocab", help="Tokens in the vocabulary."),
    _whole(_M, "--context", help="Positions: the longest sequence."),
    _whole(_M, "--classes", help="Outputs of a classifier."),
    option(_M, "--input-shape", "--sample-size", "features", type=Shape(), metavar="SHAPE",
           help="Elements of one sample: 224x224x3 or 1024."),
    option(_M, "--activation-per-layer", "layer_bytes", type=Bytes(), metavar="SIZE",
           help="With --params: what one layer keeps for the whole micro batch, such as 64KB. "
           "Left out: one output of the sample's size."),
    option(_M, "--module", metavar="FILE:NAME",
           help="A module of your own: a callable that returns it, as package.file:name or path/file.py:name. "
           "Its code is run, in a process of its own."),
    option(_M, "--sample", metavar="FILE:NAME",
           help="With --module: a callable that is given a number of samples and returns a batch."),
    option(_M, "--wrap", metavar="CLASS",
           help="With --module: the class whose modules are sharded and checkpointed one by one.  [default: found]"),
    _whole(_M, "--module-timeout", help="With --module: seconds its code may take.  [default: 120]"),
    option(_M, "--attention", type=Name("attention", ATTENTIONS), metavar="KIND",
           help=f"{_one_of(ATTENTIONS)}  [default: auto]"),
    option(_M, "--dropout", type=Number(), metavar="P", help="Dropout probability, for models that have dropout.  [default: the file's; of named models 0]"),
    _whole(_T, "--batch-size", "--micro-batch", "micro_batch", help="Samples per GPU and forward pass.  [estimate: 1]"),
    _whole(_T, "--accumulation", help="Micro batches per optimizer step.  [default: 1]"),
    _whole(_T, "--seq-len", "--tokens", "tokens", help="Tokens per sample.  [default: the model's context]"),
    option(_T, "--precision", type=Name("precision", PRECISIONS), metavar="NAME",
           help=_meanings({row.name: row.summary for row in PRECISIONS.values()}) + "\n[estimate: fp32]"),
    _flag(_T, "--adam", help="Short for --optimizer adam."),
    option(_T, "--optimizer", type=Name("optimizer", OPTIMIZERS), metavar="NAME",
           help=f"{_one_of(OPTIMIZERS)}  [default: adamw]"),
    option(_T, "--optimizer-kind", type=Name("optimizer kind", KINDS), metavar="KIND",
           help=f"{_one_of(KINDS)}  [default: torch's own, mostly foreach; on CPU for-loop]"),
    option(_T, "--checkpointing", "checkpoint_every", type=Checkpointing(), metavar="none|full|every-N",
           help="Activation checkpointing: of no block, of each, of every N blocks together.  [estimate: none]"),
    _flag(_T, "--reentrant", help="The older, reentrant form of activation checkpointing."),
    option(_T, "--loss-dtype", type=Name("loss dtype", LOSSES), metavar="KIND",
           help=f"{_one_of(LOSSES)} What the cross-entropy is computed in.  [default: float32]"),
    _flag(_T, "--keep-logits", help="The loop still holds the model's output in backward."),
    _flag(_T, "--keep-gradients", help="zero_grad(set_to_none=False): gradients stay allocated."),
    option(_W, "--strategy", type=Name("strategy", STRATEGIES), metavar="NAME",
           help=f"{_one_of(STRATEGIES)}  [estimate: single, with several GPUs ddp]"),
    option(_W, "--gpus", "ranks", type=Whole(most=MOST_RANKS), metavar="N",
           help="GPUs in all, one process each.  [default: 1]"),
    _whole(_W, "--nodes", help="Machines the GPUs are spread over.  [default: as few as hold them, 8 in each]"),
    option(_W, "--gpu", type=Name("GPU", GPUS), metavar="NAME", help=f"The card. {_one_of(GPUS)}"),
    option(_W, "--device", type=Name("device", DEVICES), metavar="KIND", help=f"{_one_of(DEVICES)}  [default: cuda]"),
    _whole(_W, "--bucket-mb", help="DDP's bucket_cap_mb.  [default: 25]"),
    _flag(_W, "--bucket-views", help="DDP's gradient_as_bucket_view."),
    _flag(_W, "--static-graph", help="DDP's static_graph."),
    option(_W, "--allocator", metavar="TEXT", help="PYTORCH_CUDA_ALLOC_CONF, such as expandable_segments:True."),
    option(_W, "--torch", metavar="VERSION", help="Version of torch, such as 2.6: older ones kept other temporaries."),
)  # fmt: skip


_GROUPS: Mapping[str, type[Group]] = {
    field.name: type(field.default) for field in dataclasses.fields(Plan) if isinstance(field.default, Group)
}
_HEADINGS = {
    "loss": "The loss", "update": "The update", "compute": "How it computes", "layout": "How ranks are arranged", "implementation": "How the model is written", "adapter": "Adapters",
    "fsdp": "FSDP", "deepspeed": "DeepSpeed", "offload": "Offload",
    "checkpointing": "Selective checkpointing",
    "startup": "Before the first step",
    "frozen": "Frozen parts",
}  # fmt: skip


def _of_group(group: str, knob: dataclasses.Field[Any]) -> Callable[[Function], Function]:
    """The option of one field of a group."""
    said, heading, name = knob.metadata, _HEADINGS[group], f"{group}__{knob.name}"
    if isinstance(knob.default, bool):
        return option(heading, said["option"], name, flag_value=not knob.default, type=bool, default=None,
                      is_flag=True, help=said["help"])  # fmt: skip
    shown = f"  [default: {said['unsaid'] or knob.default}]" if knob.default != "" else ""
    if isinstance(knob.default, float):
        return option(heading, said["option"], name, type=Number(), metavar="X", help=said["help"] + shown)
    if isinstance(knob.default, int):
        return option(heading, said["option"], name, type=Whole(said["least"]), metavar="N", help=said["help"] + shown)
    if said["choices"]:
        kind = Name(knob.name.replace("_", " "), said["choices"])
        help = f"{said['help']} {_one_of(said['choices'])}{shown}"
        return option(heading, said["option"], name, type=kind, metavar="NAME", help=help)
    return option(heading, said["option"], name, metavar="TEXT", help=said["help"] + shown)


def plan_options(command: Function) -> Function:
    """Add the MODEL argument and every option a plan is made of; all are None unless typed."""
    knobs = [_of_group(group, knob) for group, cls in _GROUPS.items() for knob in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for add in reversed([*_OPTIONS, *knobs]):
        command = add(command)
    return command


def training_tokens(command: Function) -> Function:
    """Add ``--tokens``: of the whole training, where a sample's are ``--seq-len`` alone."""
    for param in _params(command):
        if param.name == "tokens":
            param.opts.remove("--tokens")
    return option(_T, "--tokens", "train_tokens", type=Count(), metavar="COUNT",
                  help="Tokens of the whole training, such as 300b: says what it takes in GPU-hours.")(command)  # fmt: skip


def several(command: click.Command, name: str) -> None:
    """Let one option of a command be given again and again: its value is a tuple, empty where it was not."""
    for index, param in enumerate(command.params):
        if param.name == name and isinstance(param, Option):
            command.params[index] = Option(
                [*param.opts, name], section=param.section, type=param.type, metavar=param.metavar, multiple=True,
                help=param.help,
            )  # fmt: skip


def beside_options(command: Function) -> Function:
    """The same options for a command with an argument of its own, but for those that it has already."""
    plan_options(probe := lambda: None)
    added: list[click.Option] = [param for param in _params(probe) if isinstance(param, click.Option)]
    names = {param.name for param in _params(command)}
    command.__click_params__ = [*(param for param in added if param.name not in names), *_params(command)]  # type: ignore[attr-defined]
    return command


def _params(command: Callable[..., Any]) -> list[click.Parameter]:
    """Where click's decorators collect parameters, the last one first."""
    return list(getattr(command, "__click_params__", []))


def check_effect(words: Words, plan: Plan) -> None:
    """Raises InputError for an option of a group that was typed and changes nothing about the plan."""
    if not plan.strategy_row.buckets:
        for name in ("bucket_mb", "bucket_views", "static_graph"):
            if words.get(name) is not None:
                raise InputError(f"--{name.replace('_', '-')} is for DDP's buckets, not for strategy {plan.strategy}")
    model = plan.model
    if plan.family.opaque and not model.module.factory:
        counted = bool(model.layer_bytes or model.features)
        for name, option, works in (
            ("micro_batch", "--batch-size", counted),
            ("checkpoint_every", "--checkpointing", counted and model.layers > 0),
        ):
            if not works and words.get(name):
                raise InputError(
                    f"{option} changes nothing: no activations of {model.name} are counted; give --input-shape and --layers"
                )
    for group, cls in _GROUPS.items():
        idle = getattr(plan, group).idle(plan)
        for knob in dataclasses.fields(cls):  # type: ignore[arg-type]
            if knob.name in idle and words.get(f"{group}__{knob.name}") is not None:
                raise InputError(f"{knob.metadata['option']} {idle[knob.name]}")


def of_group(group: str, words: Words) -> Any:
    """What was typed of one group of a plan's fields, such as ``layout``."""
    prefix = f"{group}__"
    return _GROUPS[group](**{
        name.removeprefix(prefix): value for name, value in given(words).items() if name.startswith(prefix)
    })  # fmt: skip


def build_plan(words: Words) -> Plan:
    """The plan that was said in words; what was not said is the Plan's own default. Raises InputError.

    >>> build_plan({"model": "gpt2", "ranks": 8, "gpu": "a100-80gb"}).strategy
    'ddp'
    """
    model = build_model(words)
    words = given(words)
    fields = {field: words[field] for field in _PLAN if field in words}
    reads = FAMILIES[model.family].reads
    if reads == "tokens":
        fields.setdefault("tokens", model.context - model.position_offset)
    elif "tokens" in fields:
        raise InputError(f"--seq-len does not apply to {model.name}, which reads no tokens")
    if reads == "tokens" or model.features or model.layer_bytes or model.module.sample:
        fields.setdefault("micro_batch", 1)
    if words.get("dropout") == 0:
        model = dataclasses.replace(model, uncounted=())
    if model.dropout:  # how its file is trained
        fields.setdefault("dropout", model.dropout)
    if "adam" in words and fields.setdefault("optimizer", "adam") != "adam":
        raise InputError(f"--adam and --optimizer {fields['optimizer']} contradict each other; leave one out")
    if fields.get("ranks", 1) > 1:
        fields.setdefault("strategy", "ddp")
    row = STRATEGIES[fields.get("strategy", "single")]
    fields.setdefault(
        "nodes", unsaid_nodes(row, fields.get("device", "cuda"), fields.get("ranks", 1), fields.get("gpu"))
    )
    words.setdefault("adapter__dtype", usual_dtype(words.get("adapter__kind", "none"), row.engine))
    for group in _GROUPS:
        fields[group] = of_group(group, words)
    if not isinstance(words.get("model", ""), str) and model.family != "size" and not model.module.factory:
        fields["implementation"] = _as_transformers(words, model)
    fields.setdefault(
        "optimizer_kind", OPTIMIZERS[fields.get("optimizer", "adamw")].usual_kind(fields.get("device", "cuda"))
    )
    return Plan(model=model, set_to_none="keep_gradients" not in words, **fields)


def _as_transformers(words: Words, model: Model) -> Implementation:
    """A config.json is of transformers' code, and computed as that is written; what was typed goes first."""
    from memcalc.hf.reading import written_as

    read = words["model"]
    usual = Implementation.suited(model, written_as(read) if isinstance(read, Path) else read.written)
    prefix = "implementation__"
    return dataclasses.replace(usual, **{
        name.removeprefix(prefix): value for name, value in words.items() if name.startswith(prefix)
    })  # fmt: skip
