"""The ``memcalc`` group: finds the commands, and turns every failure into one line and an exit code.

Exit codes: 0 done; 1 a training run failed, or ``check`` found that the plan does not or may not fit; 2 bad input;
70 a bug in memcalc; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

import click

import memcalc
from memcalc.errors import LONGEST, MemcalcError, shorten
from memcalc.tables import printable

__all__ = ["app"]

GROUPS = {
    "Predict": ("estimate", "rehearse", "plot", "ui"),
    "Choose": ("recommend", "strategies", "solve", "check"),
    "Run, and look at what came of it": ("launch", "compare", "report"),
    "Understand a machine and its meters": ("doctor", "calibrate", "explain-meters", "snapshot"),
    "How far off is memcalc?": ("bench", "validate"),
    "The shell": ("completion",),
}
"""By what a person wants to do."""
_SENTENCE = 300
"""Characters that the first sentence of a command's help may have; it is wrapped, not cut."""
COMMANDS = tuple(name for names in GROUPS.values() for name in names)
"""Each is the object ``command`` in the module of its name, ``_`` for ``-``, beside this one."""

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

EXAMPLES = """\b
Examples:
  memcalc estimate gpt2 --batch-size 8 --gpu a100-80gb
  memcalc rehearse llama-3-8b --gpus 8 --strategy fsdp-full-shard --seq-len 4096 --precision amp-bf16
  memcalc estimate --params 7b --adam --precision amp-bf16
  memcalc recommend gpt2-xl --gpus 8 --gpu a100-80gb --save-plan plan.json
  memcalc check plan.json --keep-free 5%
  memcalc solve llama-3-8b --for micro-batch --gpus 8 --strategy fsdp-full-shard --gpu h100
  memcalc launch plan.json --data book.txt --steps 200 --out run
  memcalc compare run
  memcalc bench --source lightning
  memcalc explain-meters --allocated 12.1GiB --reserved 14.3GiB --device 15.6GiB --gpu a100-80gb
  memcalc snapshot snapshot.pickle

Every command explains itself: memcalc estimate --help
"""


def _module(command: str) -> str:
    return f"memcalc.cli.{command.replace('-', '_')}"


class App(click.Group):
    """A group whose commands are imported when they are called, and whose errors are one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if find_spec(_module(name))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = import_module(_module(cmd_name)).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        known = self.list_commands(ctx)
        width = max(map(len, known))
        for purpose, names in GROUPS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names if name in known]
            rows = [(f"{name:{width}}", command.get_short_help_str(_SENTENCE)) for name, command in commands if command]
            if rows:
                with formatter.section(purpose):
                    formatter.write_dl(rows)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name, known = args[0], self.list_commands(ctx)
        if not name.startswith("-") and name not in known:
            from difflib import get_close_matches

            near = get_close_matches(name[:LONGEST].lower(), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise click.UsageError(f"unknown command {shorten(name)}; {hint}known: {', '.join(known)}", ctx)
        return super().resolve_command(ctx, args)

    def main(self, args: Any = None, prog_name: str | None = None, **extra: Any) -> NoReturn:  # type: ignore[override]
        for stream in (sys.stdout, sys.stderr):
            # A terminal that cannot show a character gets "?", not a traceback.
            with contextlib.suppress(AttributeError, ValueError):
                stream.reconfigure(errors="replace")  # type: ignore[union-attr]
        words = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        extra.setdefault("obj", tuple(words))  # what was typed, for a command that shows how it is run again
        try:
            code = super().main(words, prog_name, **extra)
        except BaseException as error:
            if isinstance(error, SystemExit):
                raise
            if "--debug" in words:
                traceback.print_exc()
            line, code = explain(error)
            click.echo(f"memcalc: {printable(line)}", err=True)
        sys.exit(code if isinstance(code, int) else 0)


def explain(error: BaseException) -> tuple[str, int]:
    """One line for the user and the exit code for the shell."""
    if isinstance(error, MemcalcError):
        return str(error), error.exit_code
    if isinstance(error, click.NoSuchOption) and error.ctx is not None and (said := _elsewhere(error)):
        return f"No such option: {error.option_name}; memcalc says it {said} (see {error.ctx.command_path} --help)", 2
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{error.format_message()} (see {error.ctx.command_path} --help)", 2
    if isinstance(error, click.ClickException):
        return error.format_message(), 2
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, MemoryError):
        return "this machine has too little free memory to work that out; make the plan smaller", 2
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror.lower()}", 2
    what = f" {shorten(str(error), 200)}" if str(error) else ""
    return f"internal error {type(error).__name__}{what}; please report it with the output of memcalc --debug ...", 70


def _elsewhere(error: click.NoSuchOption) -> str:
    """How memcalc says an option of other programs, where the command can; else blank."""
    from memcalc.cli.elsewhere import elsewhere  # only a mistake needs it

    return elsewhere(error.option_name, error.ctx)


@click.group("memcalc", cls=App, context_settings=SETTINGS, epilog=EXAMPLES, invoke_without_command=True)
@click.version_option(memcalc.__version__, message="memcalc %(version)s")
@click.option(
    "--debug", is_flag=True, expose_value=False, help="Show the traceback of an error; goes before the command."
)
@click.pass_context
def app(ctx: click.Context) -> None:
    """How much memory does a training run take? Predict it, choose a strategy, run it, compare."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
