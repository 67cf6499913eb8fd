"""The docs are true: their examples run, their transcripts are what the commands print, their links lead somewhere."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import render
import transcripts

FENCE = re.compile(r"^```pycon\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("page", transcripts.PAGES, ids=name)
def test_examples_run(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    # Blank out what is no example, so that doctest reports the right line.
    kept = "\n" * text.count("\n")
    lines = kept.split("\n")
    for match in FENCE.finditer(text):
        start = text.count("\n", 0, match.start(1))
        for offset, line in enumerate(match[1].splitlines()):
            lines[start + offset] = line
    case = doctest.DocTestParser().get_doctest("\n".join(lines), {}, page.name, str(page), 0)
    report: list[str] = []
    result = doctest.DocTestRunner().run(case, out=report.append)
    assert result.failed == 0, "".join(report)


@pytest.mark.parametrize("page", transcripts.PAGES, ids=name)
def test_transcripts_are_what_the_commands_print(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert transcripts.refreshed(text) == text, "run `make docs`"


def test_what_is_to_be_installed_can_be(root: Path) -> None:
    """memcalc itself is on no index: messages and pages name the library that lacks, or the checkout."""
    files = [path for folder in ("memcalc", "trainers", "docs") for path in (root / folder).rglob("*")]
    files = [path for path in [*files, root / "README.md"] if path.suffix in (".py", ".md")]
    assert len(files) > 200
    found = [
        str(path) for path in files if re.search(r"gpu-memcalc\[|pip install '?gpu-memcalc", path.read_text("utf-8"))
    ]
    assert found == []


def test_the_docs_build(tmp_path: Path) -> None:
    assert render.build(render.DOCS, tmp_path) == []
    built = {path.relative_to(tmp_path).with_suffix("") for path in tmp_path.rglob("*.html")}
    assert built == {path.relative_to(render.DOCS).with_suffix("") for path in render.DOCS.rglob("*.md")}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("# A\n\n[x](gone.md)", "gone.md leads nowhere"),
        ("# A\n\n[x](#b)", "#b names a heading that index.md does not have"),
        ("# A\n\n## B\n\n## B", "2 headings have the anchor #b"),
        ("# A\n\n# B", "exactly one title"),
        ("# A\n\n[x][y]", "a reference without a target"),
        ("# A\n\nx <b>y</b>", "raw HTML"),
        ("# A\n\n```\nx\n```", "no known language"),
    ],
)
def test_a_fault_fails_the_build(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "index.md").write_text(text)
    found = render.build(tmp_path, tmp_path / "_build")
    assert len(found) == 1
    assert fault in found[0]
    assert not (tmp_path / "_build").exists()


def test_an_orphaned_page_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "index.md").write_text("# A")
    (tmp_path / "other.md").write_text("# B")
    assert render.build(tmp_path, tmp_path / "_build") == ["index.md: nothing leads to other.md"]


def test_links_lead_to_the_built_pages(tmp_path: Path) -> None:
    (tmp_path / "index.md").write_text("# A\n\n[b](other.md#b) [source](code.py) [web](https://example.org)")
    (tmp_path / "other.md").write_text("# B\n\n[c](below/deep.md)")
    (tmp_path / "code.py").touch()
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "deep.md").write_text("# C\n\n[a](../index.md)")
    assert render.build(tmp_path, tmp_path / "_build") == []
    page = (tmp_path / "_build" / "index.html").read_text()
    for href in ("other.html#b", "../code.py", "https://example.org"):
        assert f'href="{href}"' in page
    deep = (tmp_path / "_build" / "below" / "deep.html").read_text()
    assert deep.count('href="../index.html"') == 2  # in its text and in the navigation


def test_transcripts_are_run_and_replaced() -> None:
    text = "# A\n\n```console\n$ memcalc --version\nstale\n```\n\n```console machine\n$ memcalc --version\nkept\n```\n"
    new = transcripts.refreshed(text)
    assert "stale" not in new
    assert "kept" in new
    assert "kept" not in transcripts.refreshed(text, machine=True)


def test_the_readme_lists_six_files_that_exist(root: Path) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\d\. \[`?([\w/.]+)`?\]\(([\w/.]+)\) – \S", readme, re.MULTILINE)
    assert len(listed) == 6
    assert all(shown == path and (root / path).is_file() for shown, path in listed)
