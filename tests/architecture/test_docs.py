"""The documentation's own tools: the check for outside requests, and the docstring style."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from tests.architecture.source import ROOT


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
