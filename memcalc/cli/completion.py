"""``memcalc completion``: what a shell needs to complete commands, options, and the names of the catalogs."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from memcalc.cli.kinds import Name
from memcalc.cli.options import Command

__all__ = ["SHELLS", "command"]

SHELLS = ("bash", "zsh", "fish")

EXAMPLES = """\b
Examples:
  memcalc completion bash >> ~/.bashrc
  memcalc completion zsh >> ~/.zshrc
  memcalc completion fish > ~/.config/fish/completions/memcalc.fish

A new shell then completes with the tab key: commands, options, and the names of models, GPUs, strategies, precisions and
optimizers; elsewhere files. Bash has to be 4.4 or newer.
"""


@click.command("completion", cls=Command, epilog=EXAMPLES)
@click.argument("shell", type=Name("shell", SHELLS), metavar="bash|zsh|fish")
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the script that completes memcalc's words in your shell."""
    kind = get_completion_class(shell)
    assert kind is not None  # click has all of SHELLS
    script = kind(ctx.find_root().command, {}, "memcalc", "_MEMCALC_COMPLETE")
    click.echo(script.source_template % script.source_vars())
