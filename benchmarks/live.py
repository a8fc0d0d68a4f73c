"""Bytes of tensors that live, counted exactly and on any device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts the bytes of every storage that an operator made, as long as it lives, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fivefold":  # made of other operators, which torch shows no mode that does not ask
            with self:
                out = func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._count(x.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._refs:
            self.now += size
            self._refs[key] = weakref.ref(storage, lambda _: self._forget(key, size))

    def _forget(self, key: int, size: int) -> None:
        self.now -= size
        del self._refs[key]
