"""What a parameter is beyond its local tensor: how it is cut, how it starts, who else holds it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from .axis import Axis
from .mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Init:
    """Initial values, a function of seed, name and global element only: see :mod:`.init`."""

    kind: str = "normal"
    """``normal`` (cut at three standard deviations), ``ones`` or ``zeros``."""
    std: float = 0.02
    """Standard deviation of ``normal`` before the cut."""


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """How the local tensor of a parameter relates to the whole one."""

    sharding: tuple[str | None, ...]
    """Axis that cuts each dim, or None. The data axes are all others: the one gradient rule."""
    global_shape: tuple[int, ...]
    """Shape of the whole parameter, without padding."""
    offset: tuple[int, ...]
    """Where the local tensor starts in the whole one."""
    init: Init
    decay: bool = True
    """Whether weight decay may act on it."""
    embedding: bool = False
    """Whether it is a table of the vocabulary, which runs may choose not to decay."""
    init_name: str | None = None
    """Name of the parameter that it is one with, on the same or on another stage; None for most."""
    dtype: torch.dtype | None = None
    """Dtype it is computed with, where it is not the run's."""

    @property
    def tied(self) -> bool:
        """Whether another part has the same parameter."""
        return self.init_name is not None

    @property
    def sparse(self) -> bool:
        """Whether it lives on the sparse mesh: an expert axis cuts it, even at size 1."""
        return bool({"ep", "etp"} & set(self.sharding))

    def storage_axis(self, mesh: Mesh) -> Axis:
        """The axis its storage is cut over: every data axis but ``ddp``. The one storage rule."""
        if self.sparse:
            return mesh.efsdp
        return mesh.join("fsdp", "cp") if "tp" in self.sharding else mesh.join("fsdp", "cp", "tp")


def parameter(mesh: Mesh, shape: tuple[int, ...], sharding: tuple[str | None, ...], init: Init, *, pad: bool = False,
              decay: bool | None = None, embedding: bool = False) -> nn.Parameter:  # fmt: skip
    """A parameter on ``meta`` of this rank's shape; the data engine gives it storage and values.

    Args:
        shape: of the whole parameter.
        sharding: axis that cuts each dim, or None.
        pad: whether a dim that does not divide is padded to the next multiple (its padding starts at 0 and is never
            counted or saved).
        decay: whether weight decay may act on it; by default if it has two dims or more.
        embedding: whether it is a table of the vocabulary.

    Raises:
        ValueError: if a dim does not divide and ``pad`` is off.
    """
    local, offset = [], []
    for n, name in zip(shape, sharding, strict=True):
        axis = mesh.join(name) if name else Axis("none")
        if n % axis.size and not pad:
            raise ValueError(f"a dim of {n} in {shape} is not divisible by {name}={axis.size}")
        local.append(-(-n // axis.size))
        offset.append(axis.rank * local[-1])
    spec = ParamSpec(sharding=sharding, global_shape=tuple(shape), offset=tuple(offset), init=init,
                     decay=len(shape) > 1 if decay is None else decay, embedding=embedding)  # fmt: skip
    return attach(nn.Parameter(torch.empty(local, device="meta")), spec)


def attach(p: nn.Parameter, spec: ParamSpec) -> nn.Parameter:
    """Give ``p`` its spec."""
    p.spec = spec  # type: ignore[attr-defined]
    return p


def spec_of(p: nn.Parameter) -> ParamSpec:
    """The spec of ``p``; a parameter without one, from a plain module, is held whole by every rank."""
    spec = getattr(p, "spec", None)
    if spec is None:
        spec = ParamSpec(sharding=(None,) * p.ndim, global_shape=tuple(p.shape), offset=(0,) * p.ndim, init=Init(),
                         decay=p.ndim > 1)  # fmt: skip
    return spec


def tie(p: nn.Parameter, name: str) -> nn.Parameter:
    """Mark ``p`` as one parameter with the one called ``name``, which another part has; mark both.

    On one rank they become one; on two, both are stored, with equal values, and their gradients are summed.

    Raises:
        ValueError: if ``p`` has values of its own: two copies, on two ranks, would differ.
    """
    if not p.is_meta:
        raise ValueError(
            f"the parameter to tie to {name} has values already. Declare both with parameter(...), so that they start "
            "from one Init, or share one nn.Parameter of two parts and use pp=1"
        )
    return attach(p, replace(spec_of(p), init_name=name))
