"""Writes the reference: one page per folder of the package, one section per module."""

from __future__ import annotations

import ast
from pathlib import Path

SECTION = "## `{name}`\n\n"
MODULE = """```{{eval-rst}}
.. automodule:: {name}
   :ignore-module-all:
```
"""


def folders(package: Path) -> dict[str, list[str]]:
    """The dotted module names of each folder right under ``package`` that holds any code, sorted by name."""
    found: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        if len(parts) < 3 or parts[-1] == "__main__":
            continue
        modules = found.setdefault(parts[1], [])
        if parts[-1] != "__init__":
            modules.append(".".join(parts))
    return found


def names(package: Path) -> set[str]:
    """Every public class and function that the package defines, without its module."""
    defined: set[str] = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                defined.add(node.name)
    return defined


def page(package: Path, folder: str, modules: list[str]) -> str:
    """The Markdown of one folder's page: the folder itself, then its modules."""
    name = f"{package.name}.{folder}"
    head = f"# `{name}`\n\n"
    if (package / folder / "__init__.py").exists():
        head += MODULE.format(name=name) + "\n"
    return head + "\n".join((SECTION + MODULE).format(name=module) for module in modules)


def write(package: Path, target: Path) -> None:
    """Write ``target/<folder>.md`` for every folder that changed; delete the pages of folders that are gone."""
    target.mkdir(exist_ok=True)
    pages = {f"{folder}.md": page(package, folder, modules) for folder, modules in folders(package).items()}
    for name, text in pages.items():
        path = target / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    for path in target.glob("*.md"):
        if path.name != "index.md" and path.name not in pages:
            path.unlink()
