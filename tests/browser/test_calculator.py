"""``memcalc ui`` in a real browser, by clicks and keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from memcalc.cli.app import app
from memcalc.estimate import estimate
from memcalc.palette import contrast
from memcalc.timeline import CATEGORIES
from memcalc.ui.server import Server
from memcalc.ui.words import asked, plan_of
from memcalc.units import format_both, format_bytes
from tests.serving import served

TINY = "model=gpt2-tiny&batch-size=4&precision=amp-bf16&gpu=t4"
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served() as running:
        yield running


def opened(page: Any, server: Server, query: str = TINY) -> Any:
    page.goto(f"{server.address}?{query}")
    page.wait_for_selector("body[data-answered]")
    return page


def peak(query: str) -> str:
    return f"peak {format_both(estimate(plan_of(asked(query))).peak.bytes)} in "


def shows(page: Any, selector: str, text: str) -> None:
    """Waits until an element has the text."""
    page.locator(selector).filter(has_text=text).first.wait_for(state="attached")


def refused(page: Any) -> None:
    """Chromium writes every answer that is not 200 to the console; anything else there is an error still."""
    page.errors[:] = [error for error in page.errors if "400 (Bad Request)" not in error]


def test_a_slider_moved_by_keys_is_answered_and_its_address_gives_the_same(page: Any, server: Server) -> None:
    opened(page, server)
    shows(page, "#peak-text", peak(TINY))
    assert page.locator("#verdict-text").inner_text() == "Fits on t4"
    page.locator("#batch-range").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    moved = TINY.replace("=4", "=7")
    shows(page, "#peak-text", peak(moved))
    assert page.locator("#batch").input_value() == "7"
    shows(page, "#live", f"Fits on t4, {peak(moved)}")  # what a screen reader says, once the slider rests
    command = page.locator("#command").inner_text()
    assert command == "memcalc estimate gpt2-tiny --gpu t4 --batch-size 7 --precision amp-bf16"
    said = json.loads(CliRunner().invoke(app, [*command.split()[1:], "--format", "json"]).stdout)
    assert peak(moved).startswith(f"peak {format_both(said['allocated']['peak_bytes'])} ")
    page.reload()
    shows(page, "#peak-text", peak(moved))
    assert "batch-size=7" in page.url


def test_by_clicks_the_plan_changes_and_a_recommended_one_is_taken(page: Any, server: Server) -> None:
    opened(page, server)
    page.get_by_label("Number of GPUs", exact=True).fill("2")
    page.get_by_label("Strategy").select_option("fsdp-full-shard")
    page.get_by_label("Activation checkpointing").select_option("full")
    query = f"{TINY}&gpus=2&strategy=fsdp-full-shard&checkpointing=full"
    shows(page, "#peak-text", peak(query))
    page.wait_for_selector("#choices tbody tr")
    shows(page, "#choices-command", "--gpus 2")
    first = page.locator("#choices tbody tr").first.inner_text()
    heads = page.locator("#choices thead").inner_text().split("\t")
    row = dict(zip(heads, first.split("\t"), strict=False))
    assert " to " in row["Step"] and row["Step"].endswith("ms") and int(row["Tokens/s"].replace(",", "")) > 1000
    page.get_by_role("button", name="Take").first.click()
    strategy = first.split(",")[0]
    shows(page, "#command", f"--strategy {strategy}")
    assert page.get_by_label("Strategy").input_value() == strategy
    assert page.get_by_label("Micro batch samples per GPU", exact=True).input_value() == first.split("\t")[1].strip()


def test_a_mistake_stands_beside_its_control_until_it_is_mended(page: Any, server: Server) -> None:
    opened(page, server)
    page.get_by_label("Number of GPUs", exact=True).fill("2")
    page.get_by_label("Strategy").select_option("single")
    page.locator(".field:has(#strategy) .error").wait_for()
    assert page.locator(".field:has(#strategy) .error").inner_text().startswith("strategy single runs on 1 rank, not 2")
    assert page.locator("#strategy").get_attribute("aria-invalid") == "true"
    assert page.locator("#strategy").get_attribute("aria-describedby") == "control-error"
    page.locator("#more").fill("--batch-sise 3")
    page.get_by_label("Strategy").select_option("ddp")
    shows(page, ".error", "unknown option 'batch-sise'; did you mean 'batch-size'?")
    page.locator("#more").fill("--accumulation 2")
    shows(page, "#command", "--accumulation 2")
    assert page.locator(".error:not(:empty)").count() == 0
    refused(page)


@pytest.mark.parametrize(
    ("query", "control", "said"),
    [
        ("model=gpt2-tiny&gpu=t4&gpus=2&strategy=fspd", "strategy", "unknown strategy 'fspd'"),
        ("model=gtp2&gpu=t4", "model", "unknown model 'gtp2'; did you mean 'gpt2'?"),
        ("model=gpt2-tiny&gpu=t4&batch-size=abc", "batch", "--batch-size 'abc' is not a whole number"),
        ("model=gpt2-tiny&gpu=t4&batch-sise=3", "more", "unknown option 'batch-sise'"),
    ],
)
def test_a_mistake_in_a_link_stands_at_its_control_and_is_mended_there(
    page: Any, server: Server, query: str, control: str, said: str
) -> None:
    opened(page, server, query)
    assert page.locator(f".field:has(#{control}) .error").inner_text().startswith(said)
    assert page.locator("#batch-range").input_value() == "1"  # what is not said is 1, and the slider stands there
    mended = {"strategy": "ddp", "model": "gpt2-tiny", "batch": "2", "more": ""}[control]
    field = page.locator(f"#{control}")
    field.select_option(mended) if control in ("strategy", "model") else field.fill(mended)
    shows(page, "#peak-text", "peak ")
    assert page.locator("#control-error").count() == 0
    assert page.locator("#more").input_value() == ""
    refused(page)


def test_a_config_is_pasted_and_nothing_in_it_is_run(page: Any, server: Server) -> None:
    opened(page, server)
    page.get_by_label("Model", exact=True).select_option("a config.json of mine")
    evil = "<img src=x onerror=document.title=1>"
    page.get_by_label("or paste it").fill(json.dumps({"model_type": evil}))
    shows(page, ".error", f"my-model/config.json: model_type '{evil}' is not known")
    page.get_by_label("or paste it").fill(json.dumps(LLAMA))
    shows(page, "#model-text", "my-model: ")
    assert page.locator("#command").inner_text().startswith("memcalc estimate my-model/config.json --gpu t4 ")
    page.wait_for_url("**config=**")
    page.reload()
    shows(page, "#model-text", "my-model: ")
    assert json.loads(page.get_by_label("or paste it").input_value()) == LLAMA
    assert page.title() != "1"
    refused(page)


def test_the_timeline_is_read_by_keys_and_by_the_pointer(page: Any, server: Server) -> None:
    opened(page, server)
    found = estimate(plan_of(asked(TINY)))
    shows(page, "#readout", f"{found.peak.moment}, the peak: {format_bytes(found.peak.bytes)} in use, after ")
    legend = page.locator("#parts").inner_text()
    drawn = {CATEGORIES[each] for each in found.timeline.category.tolist()}
    assert "gradients" in drawn and all(name in legend for name in drawn)  # also where the peak has none
    for size in found.peak.by_category.values():
        assert not size or format_bytes(size) in page.locator("#readout").inner_text()
    page.get_by_label("Place in the step").focus()
    page.keyboard.press("Home")
    shows(page, "#readout", "start: ")
    box = page.locator("#timeline svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 10)
    shows(page, "#readout", "step: ")
    assert (
        page.locator("#timeline svg").get_attribute("aria-label").startswith("Memory of one training step of gpt2-tiny")
    )


def test_the_command_is_copied(page: Any, server: Server) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened(page, server)
    page.get_by_role("button", name="Copy").click()
    shows(page, "#copy", "Copied")
    assert page.evaluate("navigator.clipboard.readText()") == page.locator("#command").inner_text()


def test_a_phone_needs_no_sideways_scrolling_and_keeps_the_verdict_in_sight(page: Any, server: Server) -> None:
    page.set_viewport_size({"width": 320, "height": 640})
    opened(page, server, f"{TINY}&gpus=2&accumulation=4")
    page.wait_for_selector("#choices tbody tr")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    # Of the many moments of several micro batches only names with room for them.
    for width, some in ((760, {"visiblefalse", "hiddentrue"}), (320, {"hiddentrue"})):
        page.set_viewport_size({"width": width, "height": 640})
        names = page.evaluate(
            "async () => { await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))); "
            "return [...document.querySelectorAll('#phases span')].map(e => getComputedStyle(e).visibility + (e.scrollWidth > e.clientWidth)) }"
        )
        assert set(names) == some
    page.locator("#optimizer").scroll_into_view_if_needed()
    assert page.locator("#verdict").bounding_box()["y"] >= 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read_in_both_schemes(page: Any, server: Server, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    opened(page, server)
    back = colour(page, "body", "html", "backgroundColor")
    assert (contrast(back, "#ffffff") < 2) == (scheme == "light")
    for selector in (
        "#verdict-text",
        "#peak-text",
        "#model-text",
        "label",
        ".hint",
        "legend",
        "#parts td",
        "#readout",
        "dt",
    ):
        panel = "fieldset" if selector in ("label", ".hint", "legend") else ".panel"
        found = contrast(colour(page, selector, selector, "color"), colour(page, panel, panel, "backgroundColor"))
        assert found >= 4.5, (selector, found)


def colour(page: Any, _: str, selector: str, name: str) -> str:
    said = page.locator(selector).first.evaluate(f"element => getComputedStyle(element).{name}")
    red, green, blue = (int(part) for part in said.removeprefix("rgb(").rstrip(")").split(",")[:3])
    return f"#{red:02x}{green:02x}{blue:02x}"


def test_every_control_is_reached_by_tab_and_has_a_name(page: Any, server: Server) -> None:
    opened(page, server)
    names = page.locator("#controls").evaluate(
        "form => [...form.elements].filter(e => e.tagName !== 'FIELDSET').map(e => e.labels?.length || e.ariaLabel ? '' : e.id)"
    )
    assert not any(names)
    seen = []
    for _ in range(30):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id"))
    for control in (
        "model",
        "tokens",
        "gpu",
        "gpus",
        "strategy",
        "batch",
        "batch-range",
        "optimizer",
        "more",
        "cursor",
        "copy",
    ):
        assert control in seen
