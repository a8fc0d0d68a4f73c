"""The final weights as safetensors, whole parameters by name, in files of bounded size with an index."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from ..mesh.assemble import assemble
from .balance import routing_biases
from .state import TrainState, precision

FILE_BYTES = 4 * 2**30
"""Bytes of weights in one file, at most, unless one parameter is larger."""


def save_weights(state: TrainState, folder: Path) -> None:
    """Write every parameter in its stored dtype, and the routing biases; rank 0 writes, all ranks take part.

    ``model.safetensors.index.json`` names each tensor's file, as in the Hugging Face layout.
    """
    writer = _Writer(folder) if state.mesh.rank == 0 else None
    pieces = [s.piece for s in state.shards if s.original]
    master = precision(state.config.train, state.mesh.device).master
    for name, whole in assemble(pieces, state.shapes, state.mesh, master):
        if writer:
            writer.add(name, whole.cpu())
    for name, bias in routing_biases(state.experts, state.expert_layers, state.mesh).items():
        if writer:
            writer.add(f"{name}.bias", bias.cpu())
    if writer:
        writer.close()


class _Writer:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._held, self._bytes, self._files = folder, {}, 0, 0
        self._index: dict[str, str] = {}
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._held and self._bytes + size > FILE_BYTES:
            self._flush()
        self._held[name] = tensor.contiguous()
        self._bytes += size
        self._total += size

    def _flush(self) -> None:
        self._files += 1
        file = f"model-{self._files:05d}.safetensors"
        save_file(self._held, self._folder / file, metadata={"format": "pt"})
        self._index.update(dict.fromkeys(self._held, file))
        self._held, self._bytes = {}, 0

    def close(self) -> None:
        self._flush()
        index = {"metadata": {"total_size": self._total}, "weight_map": self._index}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
