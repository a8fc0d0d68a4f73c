"""Short texts between ranks: a name in an error message, a folder that rank 0 chose."""

from __future__ import annotations

import torch

from .axis import Axis
from .collectives import gather_values

BYTES = 512
"""Longest text, in bytes of UTF-8; what is longer is cut."""


def gather_text(text: str, axis: Axis, device: torch.device) -> list[str]:
    """Every rank's text, by place on the axis."""
    coded = text.encode()[:BYTES]
    row = torch.zeros(BYTES, dtype=torch.uint8)
    row[: len(coded)] = torch.tensor(list(coded), dtype=torch.uint8)
    rows = gather_values(row.to(device), axis).cpu().tolist()
    return [bytes(r).rstrip(b"\0").decode(errors="ignore") for r in rows]
