"""The report's page as a person meets it: by pointer, keys and touch, on a phone, and in the dark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from memcalc.cli.app import app
from memcalc.compare import Comparison, compare_run
from memcalc.estimate import estimate
from memcalc.models import MODELS
from memcalc.palette import DARK, LIGHT, contrast
from memcalc.pictures.page.report import Report
from memcalc.pictures.page.report import page as html
from memcalc.pictures.page.timeline import COLUMNS
from memcalc.pictures.step import of_rank, step
from memcalc.plan import Plan
from memcalc.units import format_bytes

RECORDED = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "recorded"
PHONE = {"width": 320, "height": 640}


@pytest.fixture(scope="module")
def run() -> Comparison:
    """A run of three blocks of gpt2-small-text on two ranks, as it was recorded for the docs."""
    return compare_run(RECORDED)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where its page is."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    result = CliRunner().invoke(app, ["report", str(RECORDED), "-o", str(path)])
    assert result.exit_code == 0, result.output
    return path.as_uri()


@pytest.fixture
def shown(page: Any, written: str) -> Iterator[Any]:
    """The page, opened; it must have asked for nothing but itself."""
    page.goto(written)
    yield page
    assert page.asked == [written]


def colour(page: Any, selector: str, name: str) -> str:
    """A computed colour as hexadecimal."""
    text = page.eval_on_selector(selector, "(e, name) => getComputedStyle(e)[name]", name)
    return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", text)[:3])


def overflow(page: Any) -> int:
    """Pixels that the page is wider than its window."""
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


def test_it_opens_at_the_peak_and_says_what_was_measured(shown: Any, run: Comparison) -> None:
    peak = run.estimate.peak
    assert shown.locator("#now").inner_text().startswith(f"{peak.moment}: {format_bytes(peak.bytes)}, at ")
    assert shown.locator("#now-total").inner_text() == format_bytes(peak.bytes)
    assert shown.locator("#now-activations").inner_text() == format_bytes(peak.by_category["activations"])
    assert f"Measured: {format_bytes(run.peak.measured)}" in shown.locator("header").inner_text()
    assert "equal to the byte" in shown.locator("main").inner_text()


def test_the_pointer_shows_the_bytes_under_it(shown: Any, run: Comparison) -> None:
    figure = step(run.estimate, COLUMNS, (of_rank(run.estimate, run.measurement.ranks[run.fullest], COLUMNS),))
    box = shown.locator("#step").bounding_box()
    seen = set()
    for column in (10, COLUMNS // 3, COLUMNS - 20):
        shown.mouse.move(box["x"] + (column + 0.5) * box["width"] / COLUMNS, box["y"] + box["height"] / 2)
        total, measured = (format_bytes(int(size[column])) for size in (figure.layers.total, figure.curves[0].live))  # type: ignore[index]
        assert shown.locator("#now").inner_text().startswith(f"{figure.layers.moments[column]}: {total}, at ")
        assert shown.locator("#now-total").inner_text() == total
        assert shown.locator("#now-measured").inner_text() == measured
        for name in figure.categories:
            assert shown.locator(f"#now-{name}").inner_text() == format_bytes(int(figure.of(name)[column]))
        seen.add(total)
    assert len(seen) == 3


def test_keys_do_the_same(shown: Any) -> None:
    slider, start = shown.locator("#at"), shown.locator("#now").inner_text()
    slider.focus()
    shown.keyboard.press("Home")
    assert slider.input_value() == "0" and shown.locator("#now").inner_text().startswith("start: ")
    shown.keyboard.press("End")
    shown.keyboard.press("ArrowLeft")
    assert slider.input_value() == str(COLUMNS - 2) and shown.locator("#now").inner_text().startswith("step: ")
    assert slider.get_attribute("aria-valuetext").startswith("step: ")
    assert shown.locator("#now").inner_text() != start
    shown.keyboard.press("Tab")
    assert shown.evaluate("document.activeElement.tagName") == "SUMMARY"
    shown.keyboard.press("Enter")
    assert "The peak is" in shown.locator("figure details p").inner_text()
    assert shown.locator("figure details p").is_visible()


def test_a_finger_does_the_same_and_a_phone_has_no_sideways_scrolling(browser: Any, written: str) -> None:
    context = browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(written)
    assert overflow(page) == 0
    svg = page.locator("#step")
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    page.touchscreen.tap(box["x"] + 3, box["y"] + box["height"] / 2)
    assert page.locator("#now").inner_text().startswith("start: ")
    for details in page.locator("summary").all():
        details.click()
    assert overflow(page) == 0
    small = page.evaluate(
        "[...document.querySelectorAll('p,td,th,li,button,.size')].filter(e => e.offsetParent && "
        "parseFloat(getComputedStyle(e).fontSize) < 12).length"
    )
    assert small == 0, "text on a phone has 12 pixels at least"
    context.close()


def test_the_dark_has_colours_of_its_own_that_can_be_read(shown: Any) -> None:
    grounds = []
    for scheme, surface in (("light", LIGHT), ("dark", DARK)):
        shown.emulate_media(color_scheme=scheme)
        page, text = colour(shown, "body", "backgroundColor"), colour(shown, "body", "color")
        assert (page, text) == (surface.page, surface.text)
        for selector in ("h1", ".muted", "#verdict", "figcaption", "caption", "td", "thead th", "code", "button"):
            assert contrast(colour(shown, selector, "color"), page) >= 4.5, (scheme, selector)
        grounds.append(page)
    assert len(set(grounds)) == 2


def test_a_model_named_as_a_script_runs_nothing(page: Any, tmp_path: Path) -> None:
    name = "<script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">"
    plan = Plan(model=replace(MODELS["gpt2-tiny"], name=name), tokens=64, micro_batch=1, gpu="t4")
    path = tmp_path / "nasty.html"
    figure = step(estimate(plan), 60)
    path.write_text(
        html(Report(figure=figure, run=None, tensors=[], alternatives=name, command=name)), encoding="utf-8"
    )
    page.goto(path.as_uri())
    assert page.locator("h1").inner_text() == name and page.title().startswith(name)
    assert page.locator("img").count() == 0 and page.asked == [path.as_uri()]
    assert page.locator("#verdict").inner_text() == "Fits on t4"


def test_without_its_script_the_page_still_says_all(browser: Any, written: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(written)
    assert page.locator("#now").inner_text().startswith("backward: ")
    assert page.locator("button:visible").count() == 0
    assert page.locator("#step polygon").count() >= 6
    context.close()
