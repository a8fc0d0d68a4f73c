"""Fails when a built page would ask another host for anything, or shows a formula that did not render.

Run as ``python docs/check_pages.py docs/_build/html``. Links that a reader clicks may point anywhere.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

OUTSIDE = re.compile(r"^\s*(?:[a-z]+:)?//", re.IGNORECASE)
CSS_REQUEST = re.compile(r"(?:url\(\s*|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)
# Attributes that a browser fetches by itself, whatever the element.
FETCHED = {"src", "srcset", "poster", "data", "xlink:href", "background"}
NOT_FETCHED_RELS = {"alternate", "author", "canonical", "index", "license", "next", "prev", "search", "top"}


class _Page(HTMLParser):
    """Collects what is wrong with one page."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self._in_style = tag == "style"
        if "katex-error" in values.get("class", "").split():
            self.problems.append(f"formula does not render: {values.get('title', '')}")
        self._css(values.get("style", ""))
        for name, value in values.items():
            fetched = name in FETCHED or (name == "href" and self._link_is_fetched(tag, values))
            urls = [part.strip().split(" ")[0] for part in value.split(",")] if name == "srcset" else [value]
            self.problems += [f"<{tag} {name}> requests {url}" for url in urls if fetched and OUTSIDE.match(url)]

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self._css(data)

    def _css(self, text: str) -> None:
        self.problems += [f"style requests {url}" for url in CSS_REQUEST.findall(text)]

    @staticmethod
    def _link_is_fetched(tag: str, values: dict[str, str]) -> bool:
        return tag in {"image", "use"} or (
            tag == "link" and not set(values.get("rel", "").lower().split()) <= NOT_FETCHED_RELS
        )


def page_problems(html: str) -> list[str]:
    """What one page's HTML requests from outside, and its formulas that failed."""
    page = _Page()
    page.feed(html)
    page.close()
    return page.problems


def css_problems(css: str) -> list[str]:
    """What a style sheet requests from outside."""
    return [f"style requests {url}" for url in CSS_REQUEST.findall(css)]


def check(folder: Path) -> list[str]:
    """The problems of every page and style sheet under ``folder``, each with its file."""
    problems: list[str] = []
    for suffix, find in ((".html", page_problems), (".css", css_problems)):
        for path in sorted(folder.rglob(f"*{suffix}")):
            problems += [f"{path.relative_to(folder)}: {problem}" for problem in find(path.read_text(encoding="utf-8"))]
    return problems


def main(folder: str) -> int:
    """Check a built site; returns the exit status."""
    pages = sorted(Path(folder).rglob("*.html"))
    if not pages:
        print(f"no pages in {folder}", file=sys.stderr)
        return 1
    problems = check(Path(folder))
    print("\n".join(problems) or f"{folder}: {len(pages)} pages, no request to another host, every formula rendered")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
