"""The harness itself: what a page asks for, and what goes wrong in it, is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_a_page_opens_and_its_scripts_run(page: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("<title>t</title><button onclick='this.textContent=6*7'>run</button>", encoding="utf-8")
    page.goto(file.as_uri())
    page.get_by_role("button").click()
    assert page.get_by_role("button").inner_text() == "42"
    assert page.asked == [file.as_uri()]


def test_a_request_that_leaves_this_machine_and_an_error_are_seen(page: Any) -> None:
    page.set_content("<img src='http://example.invalid/a.png'><script>throw new Error('torn')</script>")
    page.wait_for_load_state("networkidle")
    assert page.asked == ["http://example.invalid/a.png"]
    assert any("torn" in error for error in page.errors)
    page.asked.clear()
    page.errors.clear()
