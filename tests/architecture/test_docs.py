"""The documentation's own tools, and what it says that can be held against the code: commands, examples, formulas."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fivefold import recipes
from fivefold.cli.main import main
from fivefold.config import overrides
from fivefold.schedule import named
from fivefold.schedule.messages import messages
from fivefold.schedule.plan import check_run
from fivefold.schedule.simulate import simulate
from tests.architecture.source import ROOT
from tests.schedule import zb_table


def load(name: str) -> ModuleType:
    """A file of ``docs/``, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_pages = load("check_pages")
docstrings = load("docstrings")
reference = load("reference")
schedule_figures = load("schedule_figures")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCHEDULES = (ROOT / "docs" / "schedules.md").read_text()


@pytest.mark.parametrize(
    "html",
    [
        '<link rel="stylesheet" href="https://cdn.example/katex.min.css">',
        '<link rel="preconnect" href="//fonts.example">',
        '<link rel="icon" href="http://a.example/i.png"/>',
        '<script src="https://cdn.example/x.js"></script>',
        '<img src="//a.example/x.png">',
        '<img srcset="a.png 1x, https://a.example/b.png 2x">',
        '<iframe src="https://a.example"></iframe>',
        "<style>@import 'https://a.example/x.css';</style>",
        '<p style="background: url(https://a.example/x.png)">',
        '<span class="katex-error" title="ParseError">',
    ],
)
def test_pages_can_fail(html):
    assert check_pages.page_problems(html)


def test_pages_can_pass(tmp_path):
    page = (
        '<a href="https://arxiv.org/abs/2205.05198">paper</a><link rel="canonical" href="https://a.example/">'
        '<link rel="stylesheet" href="_static/katex.min.css"><script src="_static/x.js"></script>'
        '<svg xmlns="http://www.w3.org/2000/svg"><use href="#icon"/></svg><style>a { background: url(x.png) }</style>'
    )
    assert check_pages.page_problems(page) == []
    (tmp_path / "index.html").write_text(page)
    assert check_pages.main(str(tmp_path)) == 0
    (tmp_path / "x.css").write_text("@font-face { src: url(https://a.example/x.woff2) }")
    assert check_pages.check(tmp_path) == ["x.css: style requests https://a.example/x.woff2"]
    assert check_pages.main(str(tmp_path)) == 1


def test_an_empty_site_fails(tmp_path):
    assert check_pages.main(str(tmp_path)) == 1


DOCSTRING = """Scores ``x``s of fsdp*cp*tp ranks, max|a-b| and a_ or `tick`, :mod:`.init`.

Shapes: x [B, T].
Args:
    x: the input, which
        goes on
    *rest (n): more
Returns: $x^2$ of ``x``.

- one
  more
- two

Code:

    a = b * c

$$ \\sum_i x_i $$
"""


def test_docstrings_become_markup():
    text = "\n".join(docstrings.convert(DOCSTRING.splitlines()))
    assert r"\ ``x``\ s of fsdp\*cp\*tp ranks, max\|a-b\| and a\_ or 'tick', \ ``init``\ ." in text
    assert ":Shapes: x [B, T]." in text
    assert "    - **x**: the input, which goes on\n    - **\\*rest** (n): more" in text
    assert r":Returns: \ :math:`x^2`\  of \ ``x``\ ." in text
    assert "- one more\n- two" in text
    assert "::\n\n        a = b * c" in text
    assert ".. math::\n\n    \\sum_i x_i" in text


def test_reference_has_a_page_for_each_folder(tmp_path):
    package, target = tmp_path / "package", tmp_path / "api"
    (package / "ops").mkdir(parents=True)
    (package / "ops" / "__init__.py").write_text('"""What ops is for."""\n')
    (package / "ops" / "rope.py").write_text("def turn(): ...\n")
    target.mkdir()
    (target / "gone.md").write_text("a folder that was removed")
    (target / "index.md").write_text("kept")
    reference.write(package, target)
    assert sorted(path.name for path in target.iterdir()) == ["index.md", "ops.md"]
    page = (target / "ops.md").read_text()
    assert "automodule:: package.ops\n" in page
    assert "automodule:: package.ops.rope\n" in page
    assert reference.names(package) == {"turn"}


def blocks(text: str, language: str) -> list[str]:
    """The fenced code of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each complete ``fivefold`` command of a page, without placeholders."""
    for block in blocks(page.read_text(), "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["fivefold"]:
                yield [str(ROOT / word) if word.startswith("examples/") else word for word in words[1:]]


def problems(command: str, words: list[str]) -> list[str]:
    """What is wrong with the words behind a command that takes a recipe."""
    (recipe, *rest), given = overrides.split(words)
    layouts = ["single"]
    if "--parallel" in rest:
        behind = rest[rest.index("--parallel") + 1 :]
        layouts = [word for word in behind if not word.startswith("-")] if command == "verify" else behind[:1]
    config, found = overrides.apply(recipes.load(recipe).config, given)
    for layout in layouts:
        found += check_run(config.model_copy(update={"parallel": layout}), run=command != "show")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_legal(page: Path, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command, *words in commands(page):
        if command in ("schedule", "recipes"):
            assert main([command, *words]) == 0
            capsys.readouterr()
        elif command in ("train", "verify", "show"):
            assert problems(command, words) == [], (command, words)


def test_illegal_commands_are_found(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\n# why\nfivefold schedule zb_h9  # draw\n  --pp 4\n```\n")
    assert list(commands(page)) == [["schedule", "zb_h9"]]
    assert main(["schedule", "zb_h9"]) == 2
    assert problems("train", ["moe_tiny", "--parallel", "pp9", "--pipeline.chunk", "2"])


def test_python_on_the_page_of_schedules_runs(capsys) -> None:
    for block in blocks(SCHEDULES, "python"):
        exec(compile(block, "schedules.md", "exec"), {})
    assert capsys.readouterr().out


def test_every_schedule_is_drawn_and_recommended_and_every_stream_has_its_formulas() -> None:
    drawn = re.findall(r"^```{schedule} (\S+)$", SCHEDULES, re.MULTILINE)
    assert set(named.NAMES) <= set(drawn)
    assert list(schedule_figures.ADVICE) == list(named.NAMES)
    assert [*schedule_figures.FORMULAS, "auto"] == list(named.NAMES)


@pytest.mark.parametrize("name", schedule_figures.FORMULAS)
def test_formulas_are_those_of_the_tables(name: str) -> None:
    formula, schedule, checked = schedule_figures.FORMULAS[name], named.SCHEDULES[name], 0
    for p in (1, 2, 3, 4, 6):
        for m in range(1, 14):
            for v in (2, 3) if schedule.any_chunks else (schedule.chunks,):
                table = named.build(name, p, m, v)
                v_shaped = name in ("zb_v", "dualpipe_v")
                assert p == 1 or len(messages(table)) == (4 * m * (p - 1) if v_shaped else 2 * m * (p * v - 1))
                for times in [(1, 1, 1)] if formula.equal_times else [(1, 1, 1), (4, 3.5, 3)]:
                    names: dict[str, Any] = dict(zip("FIW", times), B=times[1] + times[2], p=p, m=m, v=v)
                    names["g"] = -(-m // max(1, m // p))
                    if m < eval(formula.start, {}, names):
                        continue
                    timeline = simulate(table, dict(zip("FIW", times)))
                    idle = getattr(timeline, formula.of) - timeline.busy
                    assert idle == pytest.approx(eval(formula.idle, {}, names)), (p, m, v)
                    assert max(timeline.peak) == eval(formula.peak, {}, names), (p, m, v)
                    checked += 1
    assert checked > 20
    assert "$2m(pv-1)$ messages, and $4m(p-1)$ if two" in SCHEDULES


def test_a_drawing_tells_what_it_shows_in_words_and_in_characters() -> None:
    html = schedule_figures.figure("zb_h1", 4, 8, costs="F=1,I=1,W=0.5")
    assert 'role="img"' in html
    assert 'aria-label="zb_h1, 4 ranks, 8 microbatches, F=1,I=1,W=0.5: the actions of each rank over time' in html
    assert "<figcaption>A rank holds up to 4 activations, up to 3 of them only for W. 48 messages.</figcaption>" in html
    assert "rank 3   .   .   .   .   .   .  F0" in html
    assert check_pages.page_problems(html) == []


def test_formulas_become_mathematics_on_one_line() -> None:
    assert schedule_figures.tex("min(m*v, 2*p-1)") == r"${\min(mv, 2p-1)}$"


def test_bubble_of_1f1b_is_the_one_in_words() -> None:
    assert "`(p-1)/(m+p-1)`, whatever the times" in SCHEDULES
    for p, m in ((2, 3), (4, 8), (5, 4)):
        assert simulate(named.build("1f1b", p, m), {"F": 3, "I": 2, "W": 1.5}).bubble == pytest.approx(
            (p - 1) / (m + p - 1)
        )


def test_what_is_said_of_the_schedules_holds() -> None:
    """Claims of the page's prose, on the pipeline that it compares them on."""
    for m in (schedule_figures.FEW, schedule_figures.MICROBATCHES):
        tables = {name: schedule_figures.build(name, schedule_figures.PP, m) for name in named.NAMES}
        prices = {name: schedule_figures.price(table) for name, table in tables.items()}
        assert prices["interleaved_split"].bubble == pytest.approx(min(price.bubble for price in prices.values()))
        assert prices["zb_h1"].bubble < prices["1f1b"].bubble / 2
        assert prices["gpipe"].bubble == pytest.approx(prices["1f1b"].bubble)
        assert prices["1f1b"].peak == prices["zb_h1"].peak == prices["interleaved_split"].peak / 2
    slow = {name: schedule_figures.price(table, comm=schedule_figures.SLOW).bubble for name, table in tables.items()}
    assert slow["zb_h2"] == min(slow.values())
    assert slow["looped_bfs"] < slow["interleaved"]
    assert prices["zb_h2"].peak < 2 * prices["zb_h1"].peak
    assert len(set(simulate(tables["zb_v"]).peak)) == 1
    assert {zb_table.TOLERANCE[name] for name in ("1F1B", "ZB-H1", "ZB-H2")} == {1e-4}
    assert {zb_table.TOLERANCE[name] for name in ("ZB-1p", "ZB-2p")} == {1e-3}
    assert named.build("interleaved", 4, 8, 1) == tables["1f1b"]
    assert named.build("interleaved_split", 4, 8, 1) == tables["zb_h1"]
