"""The fields of a recipe, group by group."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ..config import fields
from ..config.base import Part
from ..recipes import Recipe


def print_fields(recipe: Recipe, console: Console) -> None:
    """Every field that can be set: what it accepts, the recipe's value, and what it is."""
    console.print(f"\nFields, with the values of {recipe.name}:", highlight=False)
    for name in type(recipe.config).model_fields:
        group = getattr(recipe.config, name)
        if not isinstance(group, Part):
            continue
        doc = " ".join((type(group).__doc__ or "").split("\n\n")[0].split())
        console.print(Text.assemble("\n", (name, "bold"), f"  {doc}"))
        for leaf in fields.leaves(group, f"{name}."):
            flag = f"--{leaf.path.replace('_', '-')}"
            console.print(Text.assemble("  ", (flag, "cyan"), " ", leaf.value or '""'), soft_wrap=True)
            about = Text.assemble(leaf.doc, " ", (f"{leaf.kind[0].upper()}{leaf.kind[1:]}.", "dim"))
            console.print(Padding(about, (0, 0, 0, 6)))
