"""Short texts between ranks: a name in an error message, a folder that rank 0 chose, a list of names."""

from __future__ import annotations

import torch

from .axis import Axis
from .collectives import gather_values, max_values


def gather_text(text: str, axis: Axis, device: torch.device) -> list[str]:
    """Every rank's text, by place on the axis."""
    coded = torch.tensor(list(text.encode()), dtype=torch.uint8)
    longest = int(max_values(torch.tensor(len(coded), device=device), axis))
    row = torch.zeros(longest, dtype=torch.uint8)
    row[: len(coded)] = coded
    rows = gather_values(row.to(device), axis).cpu()
    return [bytes(r.tolist()).rstrip(b"\0").decode() for r in rows]
