"""Turns the package's docstrings, plain text with double-backtick code, into reStructuredText that never warns.

The style: paragraphs separated by blank lines; ``- `` starts a list item; ``Args:`` and the other labels stand at the
start of a line, with their text behind them or with indented lines below them, which are entries, each ``name: text``
or ``name  text``; a deeper indented line goes on with the entry above it; ``$...$`` is mathematics and a paragraph
``$$...$$`` displayed mathematics; a table between lines of ``====`` is a table; an indented block below a plain
paragraph is shown as it stands. Everything else is text: no character in it is markup.
"""

from __future__ import annotations

import re
from typing import Any

KEPT = re.compile(r"``.+?``|:[a-z:]+:`[^`]+`|(?<![\w$])\$(?=\S)[^$\n]+?(?<=\S)\$(?![\w$])", re.DOTALL)
HEADING = re.compile(r"^([A-Z][A-Za-z ]{1,30}):$")
LABEL = re.compile(r"^(Args|Example|Note|Raises|Returns|Shapes|Source|Sources|States|Yields): (\S.*)$")
ENTRY = re.compile(r"^(\*{0,2}[\w., *]{1,60}?)(?: \(([^)]*)\))?(?::\s+|\s{2,})(.+)$", re.DOTALL)
BULLET = re.compile(r"^([-*]|\d+\.) ")
TABLE = re.compile(r"^=+( +=+)+$")


def escape(text: str) -> str:
    """``text`` with every character that would be markup made literal; code and mathematics are kept."""
    out, end = [], 0
    for match in KEPT.finditer(text):
        out.append(_plain(text[end : match.start()]))
        kept = match.group()
        # A null escape on both sides lets code stand next to letters, as in ``x``s.
        if kept.startswith("$"):
            out.append(rf"\ :math:`{kept[1:-1]}`\ ")
        elif kept.startswith(":") and not kept.startswith(":math:"):
            out.append(rf"\ ``{kept.split('`')[1].lstrip('.~')}``\ ")  # a reference: its name, as code
        else:
            out.append(rf"\ {kept}\ ")
        end = match.end()
    return "".join(out) + _plain(text[end:])


def _plain(text: str) -> str:
    text = re.sub(r"`([^`\n]+)`", r"'\1'", text)
    return re.sub(r"([\\*`|_])", r"\\\1", text)


def convert(lines: list[str]) -> list[str]:
    """The reStructuredText of a docstring already cleaned of its common indentation."""
    out: list[str] = []
    blocks = _blocks(lines)
    for i, block in enumerate(blocks):
        indent = _indent(block[0])
        after_code = i > 0 and blocks[i - 1][-1].rstrip().endswith("::")
        if indent > 0 and (after_code or not _continues(blocks, i)):
            out += ["", "::", "", *("    " + line for line in block), ""]
        elif indent == 0:
            out += _block(block, _body(blocks, i))
    return out


def _blocks(lines: list[str]) -> list[list[str]]:
    blocks: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            blocks[-1].append(line.rstrip())
        elif blocks[-1]:
            blocks.append([])
    return [block for block in blocks if block]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _continues(blocks: list[list[str]], i: int) -> bool:
    """Whether indented block ``i`` goes on with the entries of a heading above it."""
    while i > 0 and _indent(blocks[i][0]) > 0:
        i -= 1
    return _has_entries(blocks[i])


def _has_entries(block: list[str]) -> bool:
    """Whether the block ends in a heading with entries right below it."""
    return _indent(block[-1]) > 0 and any(HEADING.match(line) for line in block)


def _body(blocks: list[list[str]], i: int) -> list[str]:
    """The lines of the indented blocks that go on with the entries of block ``i``."""
    body: list[str] = []
    if _has_entries(blocks[i]):
        for block in blocks[i + 1 :]:
            if _indent(block[0]) == 0:
                break
            body += block
    return body


def _block(block: list[str], body: list[str]) -> list[str]:
    """One paragraph, list, or run of headings with their entries."""
    if block[0].startswith("$$") and block[-1].endswith("$$"):
        formula = "\n".join(block)[2:-2].strip().splitlines()
        return ["", ".. math::", "", *("    " + line for line in formula), ""]
    if TABLE.match(block[0]) and TABLE.match(block[-1]):
        return ["", *block, ""]
    out: list[str] = [""]
    lines = block + body
    i = 0
    while i < len(lines):
        heading, label, bullet = (pattern.match(lines[i]) for pattern in (HEADING, LABEL, BULLET))
        j = i + 1
        while j < len(lines) and (_indent(lines[j]) > 0 or not (heading or _starts(lines[j]))):
            j += 1
        if heading and j > i + 1:
            out += ["", f":{heading[1]}:", *_entries(lines[i + 1 : j]), ""]
        elif label:
            text = " ".join([label[2], *(line.strip() for line in lines[i + 1 : j])])
            out += ["", f":{label[1]}: {escape(text)}", ""]
        elif bullet:
            text = " ".join(line.strip() for line in lines[i:j])[len(bullet[0]) :]
            out += [f"- {escape(text)}"]
        else:
            out += _paragraph(lines[i:j])
        i = j
    return [*out, ""]


def _starts(line: str) -> bool:
    return any(pattern.match(line) for pattern in (HEADING, LABEL, BULLET))


def _paragraph(lines: list[str]) -> list[str]:
    """Text, with lines that are indented below it shown as they stand."""
    flush = next((k for k, line in enumerate(lines) if _indent(line) > 0), len(lines))
    text = " ".join(line.strip() for line in lines[:flush])
    out = ["", escape(text[:-1] if text.endswith("::") else text), ""]
    if flush < len(lines):
        out += ["::", "", *("    " + line for line in lines[flush:]), ""]
    return out


def _entries(lines: list[str]) -> list[str]:
    """The entries under a heading as a list; an entry goes on over the deeper lines below it."""
    base = min(_indent(line) for line in lines)
    entries: list[str] = []
    for line in lines:
        if _indent(line) == base or not entries:
            entries.append(line.strip())
        else:
            entries[-1] += " " + line.strip()
    if not any(ENTRY.match(entry) for entry in entries):
        return ["    " + escape(" ".join(entries))]
    return [f"    - {_entry(entry)}" for entry in entries]


def _entry(entry: str) -> str:
    match = ENTRY.match(entry)
    if not match:
        return escape(entry)
    kind = f" ({escape(match[2])})" if match[2] else ""
    return rf"**{_plain(match[1])}**{kind}: {escape(match[3])}"


def process(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Sphinx's ``autodoc-process-docstring`` hook: rewrites ``lines`` in place."""
    lines[:] = convert(list(lines))
