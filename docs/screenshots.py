"""Draws the pictures of the docs: `python docs/screenshots.py`, with `--record` from a run that is made anew.

The run is real: three blocks of gpt2-small-text, trained by two ranks on this machine's CPUs. Its plan and its measurement
lie in docs/pictures/recorded, so that the pictures can be drawn without training again. Pages are photographed in Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
RECORDED = PICTURES / "recorded"
KEPT = ("plan.json", "run.json", "measured")
LARGEST = 150_000  # bytes of one picture

RUN = (
    "recommend gpt2-small-text --layers 3 --gpus 2 --device cpu --strategy ddp --batch-size 4 --launch --steps 6 --out"
)
SWEEP = (
    "plot gpt2-xl --gpus 8 --gpu a100-80gb --precision amp-bf16 --against micro-batch --strategy ddp --strategy zero-1 "
    "--strategy fsdp-full-shard -o"
)
STEP = "plot gpt2-xl --gpus 8 --strategy fsdp-full-shard --gpu a100-40gb --precision amp-bf16 --batch-size 10 -o"
ASKED = "?model=gpt2-xl&gpus=8&gpu=a100-80gb&strategy=fsdp-full-shard&precision=amp-bf16&batch-size=20"
"""What the calculator's page is photographed with."""


def memcalc(*words: str, where: Path = PICTURES) -> None:
    """Run a command as a user would; it must succeed."""
    subprocess.run([sys.executable, "-m", "memcalc", *words], cwd=where, env=environment(), check=True)


def environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def record() -> None:
    """Train, and keep what is small."""
    with tempfile.TemporaryDirectory() as folder:
        memcalc(*RUN.split(), "run", where=Path(folder))
        shutil.rmtree(RECORDED, ignore_errors=True)
        RECORDED.mkdir(parents=True)
        for name in KEPT:
            source = Path(folder) / "run" / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, RECORDED / name)


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium, as the tests of pages start it."""
    sys.path.insert(0, str(ROOT))
    from playwright.sync_api import sync_playwright

    from tests.browser.conftest import FLAGS, NAMES

    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        raise SystemExit("pages are photographed in a browser: apt-get install chromium")
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=list(FLAGS))
        yield chromium
        chromium.close()


def photograph(
    chromium: Any,
    address: str,
    path: Path,
    *,
    width: int,
    height: int,
    dark: bool = False,
    ready: tuple[str, ...] = ("body",),
    scale: float = 1,
) -> None:
    """A picture of a page's first screen, once all that is ``ready`` is there."""
    context = chromium.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
        device_scale_factor=scale,
    )
    page = context.new_page()
    page.goto(address)
    for selector in ready:
        page.locator(selector).first.wait_for()
    page.screenshot(path=path)
    context.close()


def report(chromium: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        memcalc("report", "recorded", "-o", str(page))
        photograph(chromium, page.as_uri(), PICTURES / "report.png", width=960, height=1240)
        photograph(chromium, page.as_uri(), PICTURES / "report-phone.png", width=360, height=900, dark=True)


def calculator(chromium: Any) -> None:
    """The page of ``memcalc ui``, which tells its address in its first line."""
    command = [sys.executable, "-m", "memcalc", "ui", "--port", "0", "--no-open"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            address = next(word for word in server.stdout.readline().split() if word.startswith("http://"))
            photograph(
                chromium,
                address + ASKED,
                PICTURES / "ui.png",
                width=1200,
                height=1330,
                ready=("#parts tbody tr", "#choices tbody tr"),
                scale=0.75,
            )
        finally:
            server.terminate()


PAGES: tuple[Callable[[Any], None], ...] = (report, *((calculator,) if find_spec("memcalc.cli.ui") else ()))


def main(words: list[str]) -> int:
    """Draw all of them; 1 when one is too large for a page."""
    PICTURES.mkdir(exist_ok=True)
    if "--record" in words:
        record()
    memcalc("plot", "recorded", "--rehearse", "-o", "run.png")
    memcalc(*STEP.split(), "step.png")
    memcalc(*SWEEP.split(), "sweep.png")
    with browser() as chromium:
        for page in PAGES:
            page(chromium)
    large = [path.name for path in PICTURES.glob("*.png") if path.stat().st_size > LARGEST]
    if large:
        print(f"larger than {LARGEST} B: {', '.join(large)}", file=sys.stderr)
    return int(bool(large))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
