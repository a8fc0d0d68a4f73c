"""Weights that a run has saved, as far as their files tell without torch: where each tensor is, and its shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from .errors import ConfigError

INDEX = "model.safetensors.index.json"
"""Names each tensor's file, as in the Hugging Face layout."""
KEY = "train.init_from"
LISTED = 8
"""Tensors that one message names, at most."""


@dataclass(frozen=True)
class SavedWeights:
    """The tensors in a folder of saved weights."""

    files: Mapping[str, Path]
    """The file of each tensor, by name."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shape of each tensor, by name."""


def saved(path: str) -> SavedWeights:
    """What is saved in ``path``, the folder of a run or its folder of weights.

    Raises:
        ConfigError: if there are no weights, or their files are not what the index says.
    """
    folder = next((f for f in (Path(path), Path(path) / "weights") if (f / INDEX).is_file()), None)
    if folder is None:
        what = "holds no saved weights" if Path(path).is_dir() else "is not a folder"
        raise ConfigError(
            [
                f"{KEY}={path} {what} (there is neither {INDEX} nor weights/{INDEX} in it). "
                "Use the folder of a run that was trained to its end with train.save_final, or its weights folder."
            ]
        )
    try:
        names = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        files = {str(name): folder / str(file) for name, file in names.items()}
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError([f"{KEY}={path} has a damaged index ({folder / INDEX}). {_OTHER}"]) from None
    shapes: dict[str, tuple[int, ...]] = {}
    for file in dict.fromkeys(files.values()):
        shapes |= _shapes(path, file)
    if absent := [name for name in files if name not in shapes]:
        raise ConfigError([f"{KEY}={path} lacks {listed(absent)}, which its index names. {_OTHER}"])
    return SavedWeights(files, {name: shapes[name] for name in files})


def problems(path: str) -> list[str]:
    """What forbids starting from ``path``, as far as its files tell; an empty path is none to start from."""
    try:
        if path:
            saved(path)
    except ConfigError as error:
        return list(error.problems)
    return []


def misfits(path: str, found: SavedWeights, wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """One message each for the tensors that the model needs and ``found`` lacks, that it does not know, and that are
    of another shape.

    Args:
        wanted: the shape of every tensor of the model.
    """
    missing = [name for name in wanted if name not in found.shapes]
    unknown = [name for name in found.shapes if name not in wanted]
    other = [
        f"{name} {found.shapes[name]} for {wanted[name]}"
        for name in wanted
        if name in found.shapes and found.shapes[name] != wanted[name]
    ]
    kinds = (("lacks tensors of the model", missing), ("has tensors that the model lacks", unknown),
             ("has tensors of another shape", other))  # fmt: skip
    return [f"{KEY}={path} {rule} ({listed(names)}). {_SAME}" for rule, names in kinds if names]


def listed(names: list[str]) -> str:
    """``names``, the first of them where they are many."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


_OTHER = "Use the weights of another run, or save these again."
_SAME = "Use weights that were saved from a model of this shape, or set model.* to theirs."


def _shapes(path: str, file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes that the header of ``file`` tells; the file is as long as it says."""
    try:
        with safe_open(file, framework="numpy") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ConfigError([f"{KEY}={path} lacks the file {file.name}, which its index names. {_OTHER}"]) from None
    except (SafetensorError, OSError) as error:
        raise ConfigError([f"{KEY}={path} has a damaged file ({file}: {error}). {_OTHER}"]) from None
