"""``memcalc explain-meters``: what each part of nvidia-smi's number is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import click

from memcalc.allocator_history import History, Replayed, load_history, replay_history
from memcalc.allocator_options import AllocatorOptions
from memcalc.cli.kinds import Bytes, Name
from memcalc.errors import InputError
from memcalc.hardware import GPUS
from memcalc.meters import COUNTERS, explain
from memcalc.tables import FORMATS, render
from memcalc.units import format_both, format_bytes

__all__ = ["command"]

EXAMPLES = """\b
Examples:
  memcalc explain-meters --allocated 18561MiB --active 25765MiB --reserved 27000MiB
  memcalc explain-meters --allocated 12.1GiB --reserved 14.3GiB --device 15.6GiB --gpu a100-80gb
  memcalc explain-meters --reserved 2MiB --device 1008MiB --format json
  memcalc explain-meters --history snapshot.pickle --allocator max_split_size_mb:128
"""
_WHAT_IF = "expandable_segments:True"


@click.command("explain-meters", epilog=EXAMPLES)
@click.option("--allocated", type=Bytes(), metavar="SIZE", help=f"{COUNTERS['allocated']}: the peak, not now.")
@click.option("--active", type=Bytes(), metavar="SIZE", help=f"{COUNTERS['active']}.")
@click.option("--reserved", type=Bytes(), metavar="SIZE", help=f"{COUNTERS['reserved']}.")
@click.option("--device", type=Bytes(), metavar="SIZE", help="Memory-Usage of nvidia-smi; write MiB, which it means.")
@click.option(
    "--history",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="What torch.cuda.memory._dump_snapshot wrote, in place of the first three: they are replayed from it.",
)
@click.option("--allocator", metavar="TEXT", help="With --history: what would this PYTORCH_CUDA_ALLOC_CONF reserve?")
@click.option("--gpu", type=Name("GPU", GPUS), metavar="NAME", help="The card, for its ranges of context and NCCL.")
@click.option("--format", "format_", type=Name("format", FORMATS), default="table", metavar="KIND",
              help=f"One of: {', '.join(FORMATS)}.  [default: table]")  # fmt: skip
def command(
    allocated: int | None,
    active: int | None,
    reserved: int | None,
    device: int | None,
    history: Path | None,
    allocator: str | None,
    gpu: str | None,
    format_: str,
) -> None:
    """Take apart what a GPU's meters show: tensors, torch's cache, and what is not torch's.

    Give at least two meters, each read over the same run; or a recorded history, which has three of them.
    """
    notes: tuple[str, ...] = ()
    if history is None and sum(size is not None for size in (allocated, active, reserved, device)) < 2:
        raise InputError(
            "give at least two of --allocated, --active, --reserved and --device, read over the same run, or --history FILE, "
            "which torch.cuda.memory._dump_snapshot writes; such as: memcalc explain-meters --allocated 12.1GiB --reserved 14.3GiB"
        )
    if history is not None:
        given = {"allocated": allocated, "active": active, "reserved": reserved}
        if doubled := [f"--{name}" for name, size in given.items() if size is not None]:
            raise InputError(f"--history {history} says the meters of torch; leave out {', '.join(doubled)}")
        recorded = load_history(history)
        replayed = replay_history(recorded)
        allocated, active, reserved = replayed.peak_allocated, replayed.peak_active, recorded.reserved[0]
        notes = tuple(_of_history(recorded, replayed, allocator))
    elif allocator is not None:
        raise InputError("--allocator needs --history FILE: other options are tried on a recorded history")
    found = explain(
        allocated=allocated, active=active, reserved=reserved, device=device, gpu=GPUS[gpu] if gpu else None
    )
    found = dataclasses.replace(found, notes=(*found.notes, *notes))
    if format_ == "json":
        click.echo(json.dumps(dataclasses.asdict(found), indent=2))
        return
    if format_ == "csv":
        rows = [(part.name, part.bytes, part.meaning) for part in found.parts]
        click.echo(render(rows, ("part", "bytes", "meaning"), "csv"))
        return
    total = sum(part.bytes for part in found.parts)
    if not total:
        raise InputError("the meters read 0 B: nothing was allocated")
    table = [
        (part.name, format_bytes(part.bytes), format_bytes(part.bytes, binary=True), f"{share:.1f} %", part.meaning)
        for part, share in ((part, 100 * part.bytes / total) for part in found.parts)
    ]
    table.append((found.total, format_bytes(total), format_bytes(total, binary=True), "100.0 %", COUNTERS[found.total]))
    click.echo(render(table, ("part", "decimal", "binary", "share", "what it is"), format_))
    click.echo()
    for line in found.notes:
        click.echo(f"- {line}" if format_ == "markdown" else f"  {line}")


def _of_history(history: History, replayed: Replayed, allocator: str | None) -> Iterator[str]:
    """Whether the replay is what was recorded, and what other options would have made of the same requests."""
    count = sum(entry.action in ("alloc", "free_requested") for entry in history.entries)
    said = f"the replay of its {count} requests and frees reserves"
    if replayed.peak_reserved == history.reserved[0] and replayed.differs_at is None:
        yield f"{said} the recorded {format_both(history.reserved[0])}, to the byte at every request"
    else:
        where = "" if replayed.differs_at is None else f"; they part at entry {replayed.differs_at}"
        yield f"{said} {format_both(replayed.peak_reserved)}, recorded are {format_both(history.reserved[0])}{where}"
    for text in dict.fromkeys(filter(None, (allocator, _WHAT_IF))):
        options = AllocatorOptions.parse(text)
        if options != history.options:
            other = replay_history(history, options).peak_reserved
            yield f"{text} would have reserved {format_both(other)} for the same requests"
