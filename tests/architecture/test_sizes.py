"""A file, a function and the package stay small enough to read."""

from __future__ import annotations

import ast

from tests.architecture.source import Module, package_modules

FILE_LINES = 500
FUNCTION_LINES = 75
CORE_LINES = 10_000
PACKAGE_LINES = 15_000
AROUND = ("cli", "data", "observe", "recipes", "tools")
"""What stands around the core: one reads a run and its parallelism without it."""


def size_violations(module: Module) -> list[str]:
    """The file and each function of it that is too long."""
    lines = len(module.text.splitlines())
    found = [f"{module.at(1)} has {lines} lines, not under {FILE_LINES}"] if lines >= FILE_LINES else []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length >= FUNCTION_LINES:
                found.append(f"{module.at(node.lineno)} {node.name} has {length} lines, not under {FUNCTION_LINES}")
    return found


def code_lines(module: Module) -> int:
    """Lines that hold code: documentation is wanted, so docstrings, comments and blank lines do not count."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    text = {
        line
        for node in ast.walk(module.tree)
        for statement in (node.body if isinstance(node, documented) else [])
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
        for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    }
    numbered = enumerate(module.text.splitlines(), start=1)
    return sum(1 for n, line in numbered if line.strip() and not line.strip().startswith("#") and n not in text)


def package_violations(modules: list[Module]) -> list[str]:
    """The package and its core, if they are too long."""
    core = [module for module in modules if module.folder not in AROUND]
    sizes = [
        ("core", sum(map(code_lines, core)), CORE_LINES),
        ("package", sum(map(code_lines, modules)), PACKAGE_LINES),
    ]
    return [
        f"the {name} has {lines} lines of code, not under {limit}" for name, lines, limit in sizes if lines >= limit
    ]


def test_files_and_functions():
    modules = package_modules()
    assert [line for module in modules for line in size_violations(module)] == []
    assert package_violations(modules) == []


def test_sizes_can_fail():
    assert size_violations(Module("ops/a.py", "x = 1\n" * 500))
    assert size_violations(Module("ops/a.py", "class A:\n    async def f(self):\n" + "        x = 1\n" * 74))
    assert size_violations(Module("ops/a.py", "def f():\n" + "    x = 1\n" * 73)) == []
    assert package_violations([Module("ops/a.py", "x = 1\n" * 499)] * 21)
    assert package_violations([Module("cli/a.py", "x = 1\n" * 499)] * 21) == []
    assert package_violations([Module("cli/a.py", "x = 1\n" * 499)] * 31)
    assert package_violations([Module("ops/a.py", '"""One.\n\nTwo."""\n\n# why\n' * 499)] * 21) == []
