"""One rank, rehearsed: ``python -m trainers.rehearsal PLAN.json OUT.json``; errors are one line and exit code 2."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import click

from memcalc.errors import MemcalcError, shorten
from memcalc.plan import Plan

__all__ = ["main"]


@click.command(help="Rehearse two steps of the plan in PLAN and leave the measurement of one rank in OUT.")
@click.argument("plan", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Which rank of the job.")
@click.option("--device", type=click.Choice(["fake", "cuda"]), default="fake", show_default=True,
              help="fake: sizes without values. cuda: real tensors and kernels on this machine's first GPU.")  # fmt: skip
def main(plan: Path, out: Path, rank: int, device: str) -> None:
    """Run it; whatever goes wrong is one line."""
    try:
        what = Plan.load(plan)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what torch's own code does with fake tensors
            from trainers.rehearsal.run import rehearse

            found = rehearse(what, rank=rank, device=device)
        found.save(out)
    except MemcalcError as error:
        _end(str(error), error.exit_code)
    except Exception as error:
        if os.environ.get("MEMCALC_DEBUG"):
            raise
        said = str(error).strip().split("\n")[0]
        _end(f"this plan cannot be rehearsed: {type(error).__name__} {shorten(said, 200)}", 1)


def _end(line: str, code: int) -> None:
    print(f"error: {line}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
