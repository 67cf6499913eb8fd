"""``memcalc rehearse``: the ledger beside the trainers' own code, and beside a real run where there is one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memcalc.cli.kinds import File, Name, Whole
from memcalc.cli.options import Command, build_plan, check_effect, option, plan_options, said_by_file
from memcalc.cli.progress import waiting
from memcalc.cli.subject import Saved, takes
from memcalc.errors import InputError
from memcalc.plan import Plan
from memcalc.tables import FORMATS, heading, printable, render
from memcalc.units import format_both, format_bytes

if TYPE_CHECKING:
    from memcalc.estimate import Estimate
    from memcalc.measurement import Measurement, RankMeasurement
    from memcalc.rehearsal import Rehearsal

__all__ = ["command"]

EXAMPLES = """\b
Examples:
  memcalc rehearse gpt2 --batch-size 8 --precision amp-bf16 --gpu a100-80gb
  memcalc rehearse llama-3-8b --gpus 8 --strategy fsdp-full-shard --seq-len 4096 --precision amp-bf16
  memcalc rehearse my-llama/config.json --seq-len 512 --precision bf16
  memcalc rehearse --module net.py:Net --input-shape 12 --batch-size 64
  memcalc rehearse plan.json --format json
  memcalc rehearse --run run
"""
_A = "The answer"


@click.command("rehearse", cls=Command, epilog=EXAMPLES)
@plan_options
@option(_A, "--plan", "plan_file", type=File(), metavar="FILE", help="Rehearse a saved plan instead.")
@option(_A, "--run", "run", type=File(), metavar="DIR",
        help="Also show what this run measured (a folder of memcalc launch); its plan is rehearsed.")  # fmt: skip
@option(
    _A, "--rank", type=Whole(0), metavar="N", help="Which rank is rehearsed.  [default: the first of the fullest stage]"
)
@option(_A, "--on", "on", type=Name("place", ("fake", "cuda")), default="fake", metavar="KIND",
        help="fake: sizes only. cuda: real kernels on one GPU of this machine.  [default: fake]")  # fmt: skip
@option(
    _A,
    "--timeout",
    type=Whole(),
    default="600",
    metavar="SECONDS",
    help="Give up then, with exit code 1.  [default: 600]",
)
@option(_A, "--format", type=Name("format", FORMATS), default="table", metavar="KIND",
        help=f"One of: {', '.join(FORMATS)}.  [default: table]")  # fmt: skip
def command(
    plan_file: Path | None, run: Path | None, rank: int | None, on: str, timeout: int, format: str, **words: Any
) -> None:
    """Run two steps of the real training code for one rank, without its GPUs, and show what they take.

    MODEL is a named model, a config.json of Hugging Face, its folder, or the file of a saved plan; or give --module for
    code of your own. One known by its size alone has no code to rehearse.
    """
    from memcalc.estimate import estimate
    from memcalc.rehearsal import rehearse, stage_of_rank, unrehearsed, usual_rank

    plan, measured = _what(plan_file, run, words)
    rank = usual_rank(plan) if rank is None else rank
    if rank >= plan.ranks:
        raise InputError(f"--rank {rank} is none of the plan's {plan.ranks}, which count from 0")
    if on == "cuda" and not unrehearsed(plan):
        from memcalc.machine import detect

        if not detect().gpus:
            raise InputError("--on cuda needs a GPU, and this machine has none that can be seen; leave it out")
    if not unrehearsed(plan):
        click.echo(f"memcalc: rehearses two steps of rank {rank} of {plan.ranks}", err=True)
    with waiting("still rehearses"):
        rehearsed = rehearse(plan, rank=rank, device=on, timeout=timeout)
    shown = _Shown(estimate(plan, stage_of_rank(plan, rank)), rehearsed, measured)
    if format == "json":
        click.echo(json.dumps(shown.as_dict(), indent=2))
    elif format == "csv":
        click.echo(render(shown.rows(), shown.columns("_bytes"), "csv"))
    else:
        click.echo(shown.text(format))


takes(command, Saved)


def _what(
    plan_file: Path | None, run: Path | None, words: dict[str, Any]
) -> tuple[Plan, tuple[Measurement, RankMeasurement] | None]:
    """The plan, and what a run of it measured on its fullest rank."""
    if isinstance(words.get("model"), Saved):
        if plan_file is not None:
            raise InputError(f"two plans, {words['model'].path} and {plan_file}; leave one out")
        plan_file, words = words["model"].path, {**words, "model": None}
    if plan_file is not None or run is not None:
        said_by_file(str(plan_file or run), words, "module", "sample", "module_timeout")
    if run is not None:
        from memcalc.measurement import Measurement

        record = Measurement.load(run)
        if plan_file is not None and Plan.load(plan_file) != record.plan:
            raise InputError(f"{run} ran another plan than {plan_file}; leave one of them out")
        _confirm(record.plan, words, f"--run {run}")
        return record.plan, (record, max(record.ranks, key=lambda rank: (rank.allocated_peak, -rank.rank)))
    if plan_file is not None:
        plan = Plan.load(plan_file)
        _confirm(plan, words, str(plan_file))
        return plan, None
    plan = build_plan(words)
    check_effect(words, plan)
    return plan, None


def _confirm(plan: Plan, words: dict[str, Any], said: str) -> None:
    """The code of a module that a file names runs only when the user names it, too."""
    from memcalc.named_code import confirm_code

    confirm_code(plan, words.get("module"), words.get("sample"), f"memcalc rehearse {said}")


@dataclass(frozen=True, slots=True)
class _Shown:
    """Three answers to one question, as far as there are three."""

    ledger: Estimate
    rehearsal: Rehearsal
    run: tuple[Measurement, RankMeasurement] | None

    def columns(self, unit: str = "") -> list[str]:
        names = [*self.names, *["measured"] * (self.run is not None)]
        return ["group", "what", *(f"{name}{unit}" for name in names)]

    @property
    def names(self) -> list[str]:
        """Who answers: where the ledger stands in for the rehearsal, it alone; where it knows half, the rehearsal alone."""
        if self.rehearsal.source == "ledger":
            return ["ledger"]
        return ["ledger", "rehearsal"] if self.known else ["rehearsal"]

    @property
    def known(self) -> bool:
        """Whether the ledger counts all that a step takes."""
        from memcalc.assumptions import activations_known

        return activations_known(self.ledger.plan)

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Group, what, and bytes by each; None where one does not say."""
        ledger, rehearsal = self.ledger.steady, self.rehearsal.peak
        run = None if self.run is None else self.run[1]
        from memcalc.compare import STATES  # no instrument tells the others apart

        top = run.timeline.steady().by_category if run and run.timeline else {}

        def row(
            group: str, what: str, ours: int | None, theirs: int | None, measured: int | None
        ) -> tuple[object, ...]:
            answers = {"ledger": ours, "rehearsal": theirs}
            return group, what, *(answers[name] for name in self.names), *[measured] * (run is not None)

        yield row("allocated", "peak", ledger.bytes, rehearsal.bytes, run.allocated_peak if run else None)
        for name, size in rehearsal.by_moment.items():
            yield row("in the moment", name, ledger.by_moment.get(name), size, run.by_moment.get(name) if run else None)
        for name, size in rehearsal.by_category.items():
            if size or (self.known and ledger.by_category[name]):
                yield row(
                    "at the peak", name, ledger.by_category[name], size, top.get(name) if name in STATES else None
                )
        if self.ledger.plan.device == "cuda":
            ours, theirs = self.ledger, self.rehearsal
            seen = (run.reserved_peak, run.device_peak) if run else (None, None)
            yield row(
                "reserved",
                "likeliest",
                ours.reserved.point,
                theirs.reserved.point if theirs.reserved else None,
                seen[0],
            )
            yield row("device", "high end", ours.device.high, theirs.device.high if theirs.device else None, seen[1])

    def text(self, format: str) -> str:
        cells, before = [], ""
        for group, what, *sizes in self.rows():
            words = ["" if size is None else format_bytes(int(str(size)), binary=True) for size in sizes]
            off = [_off(sizes[0], other) for other in sizes[1:]]
            if what in self.named_otherwise and off:
                off[0] = "other names"
            cells.append((group if group != before else "", what, *words, *off))
            before = str(group)
        head = self._title()
        title = f"**{head}**" if format == "markdown" else heading(head)
        _, _, first, *others = self.columns()
        heads = ["", "steady step", *self.columns()[2:], *(f"{first} off {name}" for name in others)]
        table = render(cells, heads, format)
        mark = "- " if format == "markdown" else "  "
        return "\n\n".join([title, table, "\n".join(mark + printable(line) for line in self.remarks())])

    @property
    def named_otherwise(self) -> tuple[str, ...]:
        """Categories at the peak of which the two have the same bytes under other names; empty where they differ in size."""
        ledger, rehearsal = self.ledger.steady.by_category, self.rehearsal.peak.by_category
        ours, theirs = (sum(each[name] for name in NAMED) for each in (ledger, rehearsal))
        if abs(ours - theirs) > ALIKE * theirs or "ledger" not in self.names:
            return ()
        return tuple(name for name in NAMED if abs(ledger[name] - rehearsal[name]) > ALIKE * rehearsal[name])

    def _title(self) -> str:
        found, plan = self.rehearsal, self.ledger.plan
        rank = f"rank {found.rank} of {plan.ranks}"
        how = "rehearsed" if found.source == "rehearsal" else "not rehearsed"
        return printable(f"{plan.model.name}, {plan.strategy}, {rank}, {how}: {format_both(found.peak.bytes)}")

    def remarks(self) -> Iterator[str]:
        from memcalc.assumptions import in_one_machine

        found = self.rehearsal
        if found.measurement is not None:
            yield f"rehearsed in {found.seconds:.1f} s: {found.measurement.instrument}"
            before = found.measurement.init_peak or 0
            more = "more than that: " if before > found.peak.bytes else "less: "
            yield f"before the steady step (building, sharding, the first step) it takes {more}{format_both(before)}"
        yield from found.remarks
        yield from in_one_machine(self.ledger.plan)
        if found.source == "rehearsal" and not self.known:
            yield "the ledger is left out: it knows this model's states, not its activations"
        if self.named_otherwise:
            sums = (sum(each.by_category[name] for name in NAMED) for each in (self.ledger.steady, found.peak))
            yield (
                "other names: a rehearsal sees which operation made a tensor, the ledger what it is for, so that a whole "
                f"gradient that is about to be sharded is a temporary there; {', '.join(NAMED)} together are {_off(*sums)} off"
            )
        if self.run is not None:
            yield f"measured on rank {self.run[1].rank}, the fullest, by: {self.run[1].instrument}"
        if self.ledger.plan.gpu is not None:
            beside = f"ledger {self.ledger.verdict}, " * ("ledger" in self.names)
            yield f"on {self.ledger.plan.gpu}: {beside}rehearsal {found.verdict}"

    def as_dict(self) -> dict[str, Any]:
        names = self.columns()[2:]
        return {
            "plan": json.loads(self.ledger.plan.to_json()),
            "rank": self.rehearsal.rank,
            "source": self.rehearsal.source,
            "remarks": list(self.remarks()),
            "verdict": {"ledger": self.ledger.verdict, "rehearsal": self.rehearsal.verdict},
            "seconds": round(self.rehearsal.seconds, 3),
            "bytes": [
                {"group": group, "what": what, **dict(zip(names, sizes, strict=True))}
                for group, what, *sizes in self.rows()
            ],
        }


NAMED = ("gradients", "activations", "temporary")
"""Categories that a rehearsal tells apart by the operation that made a tensor, and by what is left when backward ends."""
ALIKE = 0.01
"""Sizes closer than this part of the rehearsal's are taken for the same bytes."""


def _off(ledger: object, rehearsed: object) -> str:
    if not isinstance(ledger, int) or not isinstance(rehearsed, int) or not rehearsed:
        return ""
    text = f"{100 * (ledger / rehearsed - 1):+.2f} %"
    return "0.00 %" if text in ("+0.00 %", "-0.00 %") else text
