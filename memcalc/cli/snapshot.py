"""``memcalc snapshot``: what torch's own record of its allocator says."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memcalc.cli.kinds import File, Name, Whole
from memcalc.tables import FORMATS, heading, printable, render
from memcalc.units import format_both, format_bytes

if TYPE_CHECKING:
    from memcalc.snapshot_summary import Summary

__all__ = ["command"]

EXAMPLES = """\b
Examples:
  memcalc snapshot snapshot.pickle
  memcalc snapshot snapshot.pickle --device 1 --largest 30
  memcalc snapshot snapshot.pickle --format json
\b
How one is made:
  torch.cuda.memory._record_memory_history()
  ...
  torch.cuda.memory._dump_snapshot("snapshot.pickle")
"""
_TORN = ("fragmented segment", "pool", "stream", "size", "held", "by blocks", "free between", "largest free")
_POOL = ("pool", "stream", "segments", "reserved", "allocated", "waiting", "free", "split", "largest free")


@click.command("snapshot", epilog=EXAMPLES)
@click.argument("file", type=File())
@click.option("--device", type=Whole(0), metavar="N", help="The GPU.  [default: the one that reserves the most]")
@click.option(
    "--largest",
    "count",
    type=Whole(),
    default="10",
    metavar="N",
    help="Rows of the largest blocks, and of the most fragmented segments.  [default: 10]",
)
@click.option("--format", "format_", type=Name("format", FORMATS), default="table", metavar="KIND",
              help=f"One of: {', '.join(FORMATS)}.  [default: table]")  # fmt: skip
def command(file: Path, device: int | None, count: int, format_: str) -> None:
    """Read a memory snapshot of torch: the peak by category, its largest blocks, and what reserved memory holds.

    FILE is what torch.cuda.memory._dump_snapshot wrote. Nothing in it is run: only plain containers are read.
    """
    from memcalc.snapshot import load_snapshot
    from memcalc.snapshot_summary import summarise
    from memcalc.snapshot_timeline import recorded

    snapshot = load_snapshot(file, device)
    found = summarise(snapshot, recorded(snapshot), count)
    if format_ == "json":
        click.echo(json.dumps({**dataclasses.asdict(found), "split": found.split}, indent=2))
    elif format_ == "csv":
        click.echo(render(list(_rows(found)), ("group", "what", "count", "bytes"), "csv"))
    else:
        _report(found, format_)


def _rows(found: Summary) -> Iterator[tuple[str, str, int | None, int]]:
    yield "meters", "allocated, at most since the history began", None, found.peak.bytes
    if found.peak_blocks is not None:
        yield "meters", "the same in whole blocks (torch.cuda.max_memory_allocated)", None, found.peak_blocks
    yield "meters", "reserved, at most since the history began", None, found.peak_reserved
    yield "meters", "reserved at the end", None, found.reserved
    yield "reserved at the end", "in use", None, found.allocated
    yield "reserved at the end", "waiting for another stream", None, found.waiting
    yield (
        "reserved at the end",
        "whole segments free (empty_cache gives them back)",
        None,
        sum(p.free for p in found.pools),
    )
    yield "reserved at the end", "free between blocks in use (fragmentation)", None, found.split
    for category, size in found.by_category.items():
        yield f"at the peak ({found.peak.moment})", category, None, size
    for moment, size in found.peak.by_moment.items():
        yield "by moment, at most", moment, None, size
    for group in found.largest:
        yield "largest at the peak", f"{group.category}: {group.place}", group.count, group.bytes
    for pool in found.pools:
        yield "pools", f"{pool.name}, stream {pool.stream}", pool.segments, pool.reserved
    for segment in found.torn:
        yield "free in fragmented segments", f"{segment.address:#x}", segment.blocks, segment.size - segment.held


def _report(found: Summary, format_: str) -> None:
    first = f"device {found.device}: peak {format_both(found.peak.bytes)} allocated, in the moment {found.peak.moment}"
    click.echo(f"**{first}**" if format_ == "markdown" else heading(first))
    last = ""
    cells = []
    for group, what, count, size in _rows(found):
        if count is None:
            cells.append((group if group != last else "", what, format_bytes(size), format_bytes(size, binary=True)))
            last = group
    click.echo("\n" + render(cells, ("", "", "decimal", "binary"), format_))
    blocks = [
        (format_bytes(g.bytes, binary=True), g.count, format_bytes(g.each, binary=True), g.category, g.place)
        for g in found.largest
    ]
    if blocks:
        click.echo(
            "\n" + render(blocks, ("largest at the peak", "blocks", "each", "category", "asked for by"), format_)
        )
    pools = [
        (p.name, p.stream, p.segments, *(format_bytes(size, binary=True) for size in
         (p.reserved, p.allocated, p.waiting, p.free, p.split, p.largest_free)))
        for p in found.pools
    ]  # fmt: skip
    if pools:
        click.echo("\n" + render(pools, _POOL, format_))
    segments = [
        (f"{t.address:#x}", t.pool, t.stream, *(format_bytes(size, binary=True) for size in (t.size, t.held)), t.blocks,
         format_bytes(t.size - t.held, binary=True), format_bytes(t.largest_free, binary=True))
        for t in found.torn
    ]  # fmt: skip
    if segments:
        click.echo("\n" + render(segments, _TORN, format_))
    click.echo()
    for line in found.notes:
        click.echo(f"{'- ' if format_ == 'markdown' else '  '}{printable(line)}")
