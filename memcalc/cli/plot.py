"""``memcalc plot``: where the memory of a step goes, and what it grows with, as a picture."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memcalc.cli.config import config_options
from memcalc.cli.kinds import File, Name, Whole
from memcalc.cli.options import Command, option, plan_options, several
from memcalc.cli.subject import RunFolder, Saved, Subject, rehearsal_of, subject, takes
from memcalc.errors import InputError, shorten
from memcalc.tables import printable, render

if TYPE_CHECKING:
    from memcalc.pictures.step import Curve
    from memcalc.pictures.sweep import Sweep

__all__ = ["command"]

AGAINST = ("micro-batch", "seq-len", "gpus")
FORMATS = ("text", "csv", "json")
THEMES = ("light", "dark")
MOST_VALUES = 64
"""Of --values: points that a figure has room for."""
EXAMPLES = """\b
Examples:
  memcalc plot gpt2 --batch-size 8 --precision amp-bf16 --gpu a100-80gb
  memcalc plot run -o run.png
  memcalc plot plan.json --rehearse -o step.svg
  memcalc plot gpt2-xl --gpus 8 --gpu a100-80gb --against micro-batch --strategy ddp --strategy fsdp-full-shard
  memcalc plot llama-3-8b --gpu h100 --strategy fsdp-full-shard --against gpus --values 1,2,4,8,16 -o gpus.png
  memcalc plot gpt2 --format csv > step.csv

PNG and SVG need matplotlib: pip install 'matplotlib>=3.8'. The text needs nothing.
"""
POINT = ("strategy", "against", "value", "peak_bytes", "device_low_bytes", "device_high_bytes", "verdict")
_P = "The picture"


@click.command("plot", cls=Command, epilog=EXAMPLES)
@plan_options
@config_options
@option(_P, "-o", "--out", type=File(), metavar="FILE", help="Write a .png or .svg; without it the picture is text.")
@option(_P, "--against", type=Name("axis", AGAINST), metavar="KIND",
        help=f"Memory against one of: {', '.join(AGAINST)}; for several strategies with --strategy again and again. "
        "Without it: the timeline of one step.")  # fmt: skip
@option(
    _P, "--values", metavar="N,N,...", help="With --against: these values.  [default: doublings until nothing fits]"
)
@option(
    _P, "--rehearse", is_flag=True, help="Lay a rehearsal over the timeline (memcalc rehearse), as a second opinion."
)
@option(_P, "--theme", type=Name("theme", THEMES), default="light", metavar="KIND",
        help=f"Of a file, one of: {', '.join(THEMES)}.  [default: light]")  # fmt: skip
@option(_P, "--width", type=Whole(40), metavar="N", help="Columns of the text.  [default: the terminal's]")
@option(_P, "--format", type=Name("format", FORMATS), default="text", metavar="KIND",
        help=f"Without -o, one of: {', '.join(FORMATS)}.  [default: text]")  # fmt: skip
def command(
    config: Path | None, scale: int | None, out: Path | None, against: str | None, values: str | None, rehearse: bool,
    theme: str, width: int | None, format: str, strategy: tuple[str, ...], **words: Any,
) -> None:  # fmt: skip
    """Show a step's memory over time by category, or memory against batch, tokens or GPUs and where it stops fitting.

    MODEL is a named model, a config.json of Hugging Face, its folder, the file of a saved plan, or the folder of a run,
    whose measurement is laid over the estimate; or give --params or --module.
    """
    if out is not None:
        from memcalc.pictures.mpl import check_target

        check_target(out)
        if format != "text":
            raise InputError(f"--format {format} is for the terminal, -o writes a picture; leave one out")
    if against is None:
        if values is not None:
            raise InputError("--values are those of --against; say against what")
        if len(strategy) > 1:
            raise InputError("several strategies are compared with --against; a timeline is of one")
        words["strategy"] = strategy[0] if strategy else None
        _step(subject(words, config, scale, "plot"), out, rehearse=rehearse, theme=theme, width=width, format=format)
        return
    if rehearse:
        raise InputError("--rehearse is for the timeline of one step; leave out --against, or it")
    whole = isinstance(words.get("model"), Saved | RunFolder) or config is not None
    words["strategy"] = strategy[0] if strategy and not whole else None
    found = _sweep(subject(words, config, scale, "plot"), against, strategy, values)
    if out is not None:
        from memcalc.pictures.mpl import save_sweep

        save_sweep(found, out, theme)
        _wrote(out, found.text())
    elif format == "text":
        from memcalc.pictures.bars import sweep_text

        click.echo(sweep_text(found, _width(width), colours=_colours()))
    else:
        click.echo(render(_points(found), POINT, format))


takes(command, Saved, RunFolder)
several(command, "strategy")


def _step(found: Subject, out: Path | None, *, rehearse: bool, theme: str, width: int | None, format: str) -> None:
    from memcalc.pictures.step import step

    if format != "text":
        click.echo(_events(found, format))
        return
    if out is None:
        from memcalc.pictures.text import inner, step_text

        columns = inner(_width(width))
        figure = step(found.estimate, columns, _curves(found, columns, rehearse))
        click.echo(step_text(figure, _width(width), colours=_colours()))
        return
    from memcalc.pictures.mpl import COLUMNS, save_step

    figure = step(found.estimate, COLUMNS, _curves(found, COLUMNS, rehearse))
    save_step(figure, out, theme)
    _wrote(out, figure.text())


def _curves(found: Subject, columns: int, rehearse: bool) -> tuple[Curve, ...]:
    """What is laid over the estimate."""
    from memcalc.pictures.step import of_rank, of_timeline

    said = []
    if rehearse:
        said.append(of_timeline(found.estimate, rehearsal_of(found), columns))
    if found.rank is not None:
        said.append(of_rank(found.estimate, found.rank, columns))
    return tuple(said)


def _wrote(out: Path, text: str) -> None:
    click.echo(f"{printable(str(out))}: {printable(text)}")


def _width(asked: int | None) -> int:
    return asked or max(shutil.get_terminal_size((100, 24)).columns, 40)


def _colours() -> bool:
    """Colours are left out where they are not wanted; where the output is no terminal, click's echo takes them away."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _events(found: Subject, format: str) -> str:
    """Each allocation and free in order, with the bytes in use after it."""
    from memcalc.timeline import CATEGORIES, MOMENTS

    line = found.estimate.timeline
    rows = [
        (MOMENTS[moment], line.names[ident], CATEGORIES[category], delta, live)
        for moment, ident, category, delta, live in zip(
            *(part.tolist() for part in (line.moment, line.ident, line.category, line.delta, line.live())), strict=True
        )
    ]
    return render(rows, ("moment", "name", "category", "bytes", "allocated_bytes"), format)


def _points(found: Sweep) -> list[tuple[object, ...]]:
    return [
        (line.strategy, found.against, point.value, point.peak, point.low, point.high, point.verdict)
        for line in found.lines
        for point in line.points
    ]


def _sweep(found: Subject, against: str, strategies: tuple[str, ...], values: str | None) -> Sweep:
    from memcalc.pictures.sweep import sweep

    numbers = [] if values is None else [Whole().read(word, "--values") for word in values.split(",")]
    if len(numbers) > MOST_VALUES:
        raise InputError(f"--values {shorten(values)} are {len(numbers)}; a figure has room for {MOST_VALUES}")
    plan = found.estimate.plan
    made = sweep(plan, against, strategies, values=numbers, told=lambda name: click.echo(f"memcalc: {name}", err=True))
    for line in made.lines:
        if line.left_out:
            click.echo(f"memcalc: left out: {printable(line.left_out)}", err=True)
    return made
