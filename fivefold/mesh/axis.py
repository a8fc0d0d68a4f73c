"""One axis of a mesh as one rank sees it."""

from __future__ import annotations

import weakref
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path

import torch.distributed as dist

from ..observe.recorder import NULL, Recorder


@dataclass(frozen=True, eq=False)
class Axis:
    """Ranks that share everything but their place on this axis. At size 1 every collective over it disappears."""

    name: str
    """Axis name, or names joined by ``+``: ``fsdp``, ``cp+tp``."""
    size: int = 1
    rank: int = 0
    """This rank's place on the axis."""
    ranks: tuple[int, ...] = (0,)
    """World ranks along the axis, by place."""
    group: dist.ProcessGroup | None = None
    """The process group; None at size 1, and on a planned mesh that has no processes."""
    recorder: Recorder = field(default=NULL, repr=False)

    key: str = field(init=False, repr=False)
    """What names this axis in an operator's arguments, where only numbers and text can go. No two axes share one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"{self.name}/{self.size}/{self.rank}/{next(_NUMBERS)}/{_RULES:x}")
        _AXES[self.key] = self

    @cached_property
    def native(self) -> bool:
        """Whether the transport is NCCL, whose own operations are taken; gloo's are replaced, see :mod:`.gloo`."""
        return self.group is not None and dist.get_backend(self.group) == "nccl"

    def __hash__(self) -> int:
        return hash((self.name, self.ranks))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Axis) and (self.name, self.ranks) == (other.name, other.ranks)


_RULES = zlib.crc32(b"".join(path.read_bytes() for folder in ("mesh", "ops", "layers")
                             for path in sorted(Path(__file__).parents[1].joinpath(folder).rglob("*.py"))))  # fmt: skip
# Torch keeps compiled graphs on disk and knows them by their forward's operators and arguments. What the operators'
# shapes and gradients depend on must therefore be in the key: size, rank, and the rules themselves. Otherwise one rank
# would run another's backward, or that of an older version.
_NUMBERS = count()
_AXES: weakref.WeakValueDictionary[str, Axis] = weakref.WeakValueDictionary()
# The one table of the package that changes: torch operators can carry only numbers and text, so an axis crosses a
# compiled graph as its key. Weak: an axis is found as long as its mesh lives, like torch's own table of groups. No key
# comes twice: two meshes over the same ranks, with recorders of their own, stay apart.


def find(key: str) -> Axis:
    """The living axis of that key.

    Raises:
        KeyError: if its mesh is gone.
    """
    return _AXES[key]
