"""Markdown to HTML, strictly: `python docs/render.py` writes docs/_build or says what is wrong and exits 1.

What fails a build: a link to a page, file or heading that does not exist, two headings with one anchor, a page
with no title or more than one, a page that the index does not lead to, a link reference without a target,
a code block that does not say its language, a picture without words for those who do not see it, and raw HTML. Links to the web are left alone.
"""

from __future__ import annotations

import html
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

__all__ = ["anchors", "build", "faults"]

DOCS = Path(__file__).resolve().parent
WORDS = 4
"""A picture's text has at least as many."""
LANGUAGES = {"console", "json", "pycon", "python", "text", "yaml"}
TEMPLATE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title} · memcalc</title>
<style>
body {{ max-width: 56rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.5 system-ui, sans-serif; }}
nav a {{ margin-right: 1rem; }}
pre {{ overflow-x: auto; padding: .75rem; background: #8881; font-size: .875rem; line-height: 1.35; }}
img {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; }}
th, td {{ padding: .25rem .6rem; border: 1px solid #8884; text-align: left; vertical-align: top; }}
</style>
<nav>{nav}</nav>
<main>
{body}</main>
</html>
"""


def parse(text: str) -> list[Token]:
    return MarkdownIt("commonmark", {"html": False}).enable("table").parse(text)


def anchors(tokens: list[Token]) -> list[str]:
    """The anchor of each heading, spelt as GitHub spells it, so that links work in both places.

    >>> anchors(parse("# The `step` moment, again"))
    ['the-step-moment-again']
    """
    titles = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]
    return [re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles]


def inline(tokens: list[Token], kind: str) -> Iterator[Token]:
    """All tokens of one kind inside the text of a page."""
    for token in tokens:
        yield from (child for child in token.children or [] if child.type == kind)


def faults(page: Path) -> Iterator[str]:
    """What is wrong with one page, a line each."""
    tokens = parse(page.read_text(encoding="utf-8"))
    if [token.tag for token in tokens if token.type == "heading_open"].count("h1") != 1:
        yield f"{page.name}: a page has exactly one title"
    for anchor, count in Counter(anchors(tokens)).items():
        if count > 1:
            yield f"{page.name}: {count} headings have the anchor #{anchor}"
    for token in tokens:
        if token.type == "fence" and token.info.split(" ")[0] not in LANGUAGES:
            yield f"{page.name}: code block at line {(token.map or [0])[0] + 1} has no known language"
    for link in inline(tokens, "link_open"):
        yield from broken(page, str(link.attrs["href"]))
    for image in inline(tokens, "image"):
        yield from broken(page, str(image.attrs["src"]))
        if len(image.content.split()) < WORDS:
            yield f"{page.name}: {image.attrs['src']} has no words that say what is on it"
    for text in inline(tokens, "text"):
        if re.search(r"\]\[|</?[a-z]+[ >]", text.content):
            yield f"{page.name}: raw HTML or a reference without a target in {text.content!r}"


def broken(page: Path, href: str) -> Iterator[str]:
    if "://" in href:
        return
    path, _, anchor = href.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        yield f"{page.name}: {href} leads nowhere"
    elif anchor and anchor not in anchors(parse(target.read_text(encoding="utf-8"))):
        yield f"{page.name}: {href} names a heading that {target.name} does not have"


def build(docs: Path, out: Path) -> list[str]:
    """Write every page of ``docs`` as HTML into ``out``; returns the faults, and writes nothing if there are any."""
    docs = docs.resolve()
    pages = sorted(page for page in docs.rglob("*.md") if out.resolve() not in page.parents)
    pages.sort(key=lambda page: (page.parent != docs, page.stem != "index"))
    readme = docs.parent / "README.md"
    found = [fault for page in [*pages, *([readme] if readme.exists() else [])] for fault in faults(page)]
    reached = reachable(docs / "index.md")
    found += [f"index.md: nothing leads to {page.name}" for page in pages if page not in reached]
    if found:
        return found
    for page in pages:
        target = out / page.relative_to(docs).with_suffix(".html")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(rendered(page, docs, target, pages), encoding="utf-8")
    return []


def reachable(start: Path) -> set[Path]:
    """Pages one comes to by following links."""
    found: set[Path] = set()
    pending = [start.resolve()]
    while pending:
        page = pending.pop()
        if page.suffix == ".md" and page.exists() and page not in found:
            found.add(page)
            links = inline(parse(page.read_text(encoding="utf-8")), "link_open")
            pending += [(page.parent / str(link.attrs["href"]).partition("#")[0]).resolve() for link in links]
    return found


def rendered(page: Path, docs: Path, target: Path, pages: list[Path]) -> str:
    """One page as HTML; links to pages lead to the built ones, links to other files to where those are."""
    tokens = parse(page.read_text(encoding="utf-8"))
    headings = [token for token in tokens if token.type == "heading_open"]
    for heading, anchor in zip(headings, anchors(tokens), strict=True):
        heading.attrSet("id", anchor)
    for link in inline(tokens, "link_open"):
        path, hash_, anchor = str(link.attrs["href"]).partition("#")
        if (page.parent / path).resolve() in pages:
            link.attrSet("href", f"{path[:-3]}.html{hash_}{anchor}")
        elif path and "://" not in path:
            link.attrSet("href", os.path.relpath(page.parent / path, target.parent))
    for image in inline(tokens, "image"):
        if "://" not in str(image.attrs["src"]):
            image.attrSet("src", os.path.relpath(page.parent / str(image.attrs["src"]), target.parent))
    steps = "../" * len(page.relative_to(docs).parts[1:])
    nav = " ".join(f'<a href="{steps}{other.stem}.html">{other.stem}</a>' for other in pages if other.parent == docs)
    title = tokens[tokens.index(headings[0]) + 1].content
    markdown = MarkdownIt("commonmark")
    body = markdown.renderer.render(tokens, markdown.options, {})
    return TEMPLATE.format(title=html.escape(title), nav=nav, body=body)


if __name__ == "__main__":
    wrong = build(DOCS, DOCS / "_build")
    print("\n".join(wrong) if wrong else f"docs are in {os.path.relpath(DOCS / '_build')}")
    sys.exit(bool(wrong))
