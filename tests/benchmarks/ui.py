"""A slider of `memcalc ui` from its move to the new picture, against a process of the command line for each move.

    python tests/benchmarks/ui.py

Aim: under 100 ms for what the server does and for what a person sees in the browser, GPT-2 XL and Llama 3 8B on eight GPUs.
Each move asks for another micro batch, so nothing is answered from a cache of whole answers. Without a browser only the server's side is timed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from timing import interleave, options, ratio, report

ROOT = Path(__file__).resolve().parents[2]
PLANS = {
    "gpt2-xl": "model=gpt2-xl&gpu=a100-80gb&precision=amp-bf16",
    "llama-3-8b on 8": "model=llama-3-8b&gpu=h100-80gb&gpus=8&strategy=fsdp-full-shard&precision=amp-bf16&seq-len=4096",
}
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def server(port: int, query: str) -> Callable[[], float]:
    """One request on a connection that is there already, as a browser's is."""
    moves = iter(range(1, 10**6))

    def move() -> float:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.connect()
        start = time.perf_counter()
        connection.request("GET", f"/api/picture?{query}&batch-size={next(moves) % 24 + 1}")
        text = connection.getresponse().read()
        taken = time.perf_counter() - start
        connection.close()
        assert json.loads(text)["estimate"]["allocated"]["peak_bytes"] > 0
        return taken

    return move


def browser(page: Any, port: int, query: str) -> Callable[[], float]:
    """An arrow key on the slider, until the page has drawn the answer: what its own clock says of it."""
    opened = False

    def move() -> float:
        nonlocal opened
        if not opened:
            page.goto(f"http://127.0.0.1:{port}/?{query}&batch-size=2")
            page.wait_for_selector("body[data-answered]")
            opened = True
        page.wait_for_timeout(1200)  # at rest, as before a person's move: the recommendation of the last one has begun
        page.wait_for_selector("#choices:not([hidden])")
        before = int(page.locator("body").get_attribute("data-answered"))
        page.locator("#batch-range").press("ArrowRight")
        page.wait_for_selector(f"body[data-answered='{before + 1}'], body[data-answered='{before + 2}']")
        return float(page.locator("body").get_attribute("data-ms")) / 1000

    return move


def command(query: str) -> Callable[[], object]:
    words = [part for pair in query.split("&")[1:] for part in f"--{pair}".split("=")]
    model = query.split("&")[0].removeprefix("model=")
    call = [sys.executable, "-m", "memcalc", "estimate", model, *words, "--batch-size", "2", "--format", "json"]
    return lambda: subprocess.run(call, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def measured(asked: Namespace, port: int, page: Any) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {}
    for name, query in PLANS.items():
        sides: dict[str, Callable[[], object]] = {
            f"{name}: server": server(port, query),
            f"{name}: a process a move": command(query),
        }
        if page is not None:
            sides[f"{name}: in the browser"] = browser(page, port, query)
        taken |= interleave(sides, asked.rounds, cold=asked.small)
    return taken


def main() -> None:
    asked = options(str(__doc__), rounds=9)
    program = shutil.which("chromium") or shutil.which("google-chrome")
    words = [sys.executable, "-m", "memcalc", "ui", "--no-open"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as serving:
        try:
            assert serving.stdout is not None
            port = int(serving.stdout.readline().split("/ ")[0].rpartition(":")[2])
            if program is None:
                taken = measured(asked, port, None)
            else:
                from playwright.sync_api import sync_playwright

                with sync_playwright() as driver:
                    chromium = driver.chromium.launch(executable_path=program, args=FLAGS)
                    page = chromium.new_page()
                    page.set_default_timeout(60_000)
                    taken = measured(asked, port, page)
                    chromium.close()
        finally:
            serving.terminate()
    ratios = {
        f"{name}, process to server": round(ratio(taken, f"{name}: a process a move", f"{name}: server"), 1)
        for name in PLANS
    }
    report(taken, as_json=asked.json, **ratios, aim_at_most_ms=100)


if __name__ == "__main__":
    main()
