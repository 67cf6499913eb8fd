"""The report's page: nothing of it is markup that was a name, nothing is asked of the network, and it says what is known."""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memcalc.cli.app import app
from memcalc.estimate import estimate
from memcalc.models import MODELS
from memcalc.pictures.page.html import Html, data, element
from memcalc.pictures.page.report import Report, alternatives, page
from memcalc.pictures.step import step
from memcalc.plan import Plan
from memcalc.timeline import CATEGORIES
from memcalc.units import format_both, format_bytes

NASTY = "<script>alert(1)</script>\"'&</title><!-- ${x}"
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, list(words))


class Reader(HTMLParser):
    """Elements, attributes and text of a page as a browser would find them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} ends what it did not begin"

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text += f"{data} "


def made(plan: Plan, command: str = "memcalc report") -> str:
    return page(Report(
        figure=step(estimate(plan), 120), run=None, tensors=[("a.weight", "parameters", "2 × 3 × 4 B", 1, 24)],
        alternatives="Not asked.", command=command,
    ))  # fmt: skip


TINY = Plan(model=MODELS["gpt2-tiny"], tokens=64, micro_batch=2, gpu="t4")


@given(st.text(), st.text())
@example(NASTY, NASTY)
@settings(max_examples=30)
def test_plain_text_is_escaped_wherever_it_is_put(content: str, attribute: str) -> None:
    made = element("p", content, title=attribute)
    found = Reader(made)
    assert [tag for tag, _ in found.tags] == ["p"] and isinstance(made, Html)
    assert made.count("<") == 2 and made.count(">") == 2


@given(st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
@settings(max_examples=30)
def test_data_in_a_page_is_what_it_was_and_ends_nothing(value: object) -> None:
    text = data("x", value)
    assert text.count("<") == 2 and "-->" not in text
    assert json.loads(text[text.index(">") + 1 : text.rindex("<")]) == value


def test_a_model_named_as_a_script_is_harmless() -> None:
    found, usual = (
        Reader(made(replace(TINY, model=replace(TINY.model, name=name)), name)) for name in (NASTY, "gpt2-tiny")
    )
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in usual.tags], "the name made an element"
    assert found.open == [] and NASTY in found.text
    assert all(not key.startswith("on") and key != "style" for _, said in found.tags for key in said)


def test_nothing_comes_from_elsewhere_and_the_policy_forbids_it() -> None:
    text = made(TINY)
    found = Reader(text)
    assert not re.search(r"https?:|//[a-z]|url\(|@import", text)
    assert all("src" not in said and "href" not in said for _, said in found.tags)
    (policy,) = (said["content"] for _, said in found.tags if said.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and "default-src 'none'" in policy and "unsafe" not in policy


def test_the_same_gives_the_same_page() -> None:
    assert made(TINY) == made(TINY)


@pytest.mark.parametrize(("gpu", "said"), [
    ("t4", "Fits on t4"), (None, "No card was named, so there is no verdict"),
])  # fmt: skip
def test_the_answer_stands_first(gpu: str | None, said: str) -> None:
    found = estimate(replace(TINY, gpu=gpu))
    text = Reader(made(replace(TINY, gpu=gpu))).text
    assert 0 < text.index(said) < text.index(format_both(found.peak.bytes)) < text.index("In the meters")
    for size in found.peak.by_category.values():
        assert format_bytes(size) in text
    assert all(line in " ".join(text.split()) for line in (" ".join(each.split()) for each in found.assumptions))


def test_a_run_on_cpu_cores_is_not_told_to_name_a_card() -> None:
    text = Reader(made(replace(TINY, gpu=None, device="cpu", optimizer_kind="for-loop"))).text
    assert "memcalc check says whether it fits in the RAM" in text and "No card was named" not in text


def test_what_a_category_takes_at_most_is_exact_however_few_columns_there_are() -> None:
    found = estimate(TINY)
    for columns in (7, 500):
        figure = step(found, columns)
        text = page(Report(figure=figure, run=None, tensors=[], alternatives="", command=""))
        rows = dict(re.findall(r'</span>(\w+)</th>.*?most">(.*?)</td>', text))
        assert set(rows) == {name for name in CATEGORIES if figure.most(name)}
        for name, size in rows.items():
            of_it = np.where(found.timeline.category == CATEGORIES.index(name), found.timeline.delta, 0)
            assert size == format_bytes(int(np.cumsum(of_it).max()))


def test_alternatives_are_of_the_same_job_or_say_why_not() -> None:
    found = alternatives(replace(TINY, ranks=4, strategy="ddp"))
    assert not isinstance(found, str)
    assert {(c.plan.ranks, c.plan.global_batch, c.plan.precision) for c in found.plans} == {(4, 8, "fp32")}
    text = page(Report(figure=step(estimate(TINY), 40), run=None, tensors=[], alternatives=found, command=""))
    assert found.plans[0].reason in html.unescape(text)
    for plan, said in (
        (replace(TINY, gpu=None), "name a card"),
        (replace(TINY, gpu=None, device="cpu", optimizer_kind="for-loop"), "how much RAM"),
    ):
        assert said in str(alternatives(plan))


def test_the_page_shows_how_it_is_made_again(run: Run, tmp_path: Path) -> None:
    words = ["report", "gpt2-tiny", "--gpu", "t4", "--batch-size", "2", "-o", "a b.html"]
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("a b.html: peak ") and "open it in a browser" in result.stdout
    assert result.stderr == "memcalc: looks for other plans that fit\n"
    text = (tmp_path / "a b.html").read_text(encoding="utf-8")
    assert shlex.join(["memcalc", *words]) in html.unescape(text)
    plan = html.unescape(re.findall(r'<code id="plan">(.*?)</code>', text, re.DOTALL)[0])
    assert Plan.from_json(plan).micro_batch == 2
    (tmp_path / "plan.json").write_text(plan)
    assert run("report", "plan.json", "-o", "again.html").exit_code == 0
    peak = r'<p class="big">.*?</p>'
    assert re.findall(peak, text) == re.findall(peak, (tmp_path / "again.html").read_text())


@pytest.mark.parametrize(("words", "said"), [
    (["gpt2-tiny"], "say where with -o report.html"),
    (["gpt2-tiny", "-o", "report.pdf"], "'report.pdf' says no page; end its name in .html"),
    (["missing", "-o", "r.html"], "unknown model 'missing'"),
    (["gpt2-tiny", "-o", "no/such/r.html"], "cannot be written"),
    (["--params", "1e6", "--rehearse", "-o", "r.html"], "cannot be rehearsed"),
])  # fmt: skip
def test_mistakes_are_one_line_and_write_nothing(run: Run, tmp_path: Path, words: list[str], said: str) -> None:
    result = run("report", *words)
    assert result.exit_code == 2 and said in result.output and "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_model_known_by_its_size_has_a_page(run: Run, tmp_path: Path) -> None:
    assert run("report", "--params", "7b", "--adam", "--gpu", "h100", "-o", "r.html").exit_code == 0
    text = Reader((tmp_path / "r.html").read_text(encoding="utf-8")).text
    assert "Does not fit on h100" in text and "Activations are not counted." in text
