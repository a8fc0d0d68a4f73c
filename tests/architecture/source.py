"""Reads the package as syntax trees, without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "fivefold"


@dataclass(frozen=True)
class Import:
    """One imported module: ``fivefold.mesh.axis`` in ``from ..mesh.axis import Axis``."""

    module: str
    names: tuple[str, ...]
    line: int
    late: bool
    """Whether it stands inside a function."""


@dataclass(frozen=True)
class Module:
    """One file of the package. ``path`` is relative to the package's folder, as ``mesh/axis.py``."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def folder(self) -> str:
        """The folder right under the package; empty for files beside ``__init__.py``."""
        return self.path.split("/")[0] if "/" in self.path else ""

    @property
    def name(self) -> str:
        """The dotted name."""
        parts = [PACKAGE, *self.path.removesuffix(".py").split("/")]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def at(self, line: int) -> str:
        return f"{PACKAGE}/{self.path}:{line}"

    def imports(self) -> Iterator[Import]:
        """Every import statement, relative ones resolved."""
        for node, late in self.nodes():
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(alias.name, (), node.lineno, late)
            elif isinstance(node, ast.ImportFrom):
                names = tuple(alias.name for alias in node.names)
                yield Import(self._absolute(node), names, node.lineno, late)

    def nodes(self) -> Iterator[tuple[ast.AST, bool]]:
        """Every node, and whether it stands inside a function."""
        stack: list[tuple[ast.AST, bool]] = [(self.tree, False)]
        while stack:
            node, late = stack.pop()
            yield node, late
            inside = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            stack += [(child, inside) for child in ast.iter_child_nodes(node)]

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        package = [PACKAGE, *self.path.split("/")[:-1]]
        base = package[: len(package) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])


@cache
def package_modules() -> list[Module]:
    """Every Python file of the package."""
    base = ROOT / PACKAGE
    return [Module(path.relative_to(base).as_posix(), path.read_text()) for path in sorted(base.rglob("*.py"))]


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for an attribute chain that starts at a name, else the empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""
