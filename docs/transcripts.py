"""Runs the commands shown in the docs: `python docs/transcripts.py` puts their real output in place.

A block that starts with ```` ```console ```` is a transcript: each line `$ memcalc …` is run, and what follows
it is replaced by what it printed. All commands of one page run in one empty folder, in order. A block marked
```` ```console machine ```` shows what depends on the machine (its cores, its speed); it is run only with
`--machine`, and no test compares it. In the folder lie `book.txt`, the text of all pages, to train on, `mistral/config.json`,
that of the published 7B model, `snapshot.pickle`, a small memory snapshot in torch's format, `recorded`, a run's plan and
measurement, and what stands in blocks marked ```` ```python NAME.py ````.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["PAGES", "refreshed"]

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "strategies").glob("*.md")),
]
BLOCK = re.compile(r"^```console( machine)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^```python (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIMEOUT = 180  # seconds for one command
PROGRESS = re.compile(
    r"memcalc: (still .*, \d+ s|\d+ of \d+ \w.*)"
)  # what is said every few seconds: how fast this machine is


def transcript(block: str, folder: Path) -> str:
    """The same commands with the output they give today."""
    lines: list[str] = []
    for command in re.findall(r"^\$ (?:.*\\\n)*.*$", block, re.MULTILINE):
        lines += [command, *output(command.removeprefix("$ ").replace("\\\n", " "), folder)]
    return "".join(f"{line}\n" for line in lines)


def output(command: str, folder: Path) -> list[str]:
    """Lines one command prints, then its exit status where the command asks for it with ``; echo $?``."""
    words = shlex.split(command.removesuffix("; echo $?"))
    if words[0] != "memcalc":
        raise SystemExit(f"only memcalc is run in transcripts, not: {command}")
    done = subprocess.run(
        [sys.executable, "-m", "memcalc", *words[1:]],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=TIMEOUT,
    )
    if "Traceback (most recent call last)" in done.stdout:
        raise SystemExit(f"{command} failed:\n{done.stdout}")
    status = [str(done.returncode)] if command.endswith("; echo $?") else []
    return [line.rstrip() for line in done.stdout.rstrip().splitlines() if not PROGRESS.fullmatch(line)] + status


def refreshed(text: str, *, machine: bool = False) -> str:
    """A page with its transcripts run again; blocks that depend on the machine only on request."""
    with tempfile.TemporaryDirectory() as folder:
        book = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
        (Path(folder) / "book.txt").write_text(book, encoding="utf-8")
        (Path(folder) / "mistral").mkdir()
        shutil.copy(ROOT / "tests" / "configs" / "mistral-7b.json", Path(folder) / "mistral" / "config.json")
        shutil.copy(ROOT / "docs" / "snapshot.pickle", folder)
        shutil.copytree(ROOT / "docs" / "pictures" / "recorded", Path(folder) / "recorded")
        for name, code in FILE.findall(text):
            (Path(folder) / name).write_text(code, encoding="utf-8")

        def block(match: re.Match[str]) -> str:
            if match[1] and not machine:
                return match[0]
            return f"```console{match[1] or ''}\n{transcript(match[2], Path(folder))}```"

        return BLOCK.sub(block, text)


if __name__ == "__main__":
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = refreshed(old, machine="--machine" in sys.argv)
        if new != old:
            page.write_text(new, encoding="utf-8")
            sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), "old", page.name))
