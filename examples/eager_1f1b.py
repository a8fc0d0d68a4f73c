"""A pipeline schedule of one's own: 1F1B that runs forwards twice as far ahead, so that messages have time to travel.

Price it, hold a layout under it against one rank, and train with it:

    fivefold schedule examples/eager_1f1b.py:eager_1f1b --pp 4 --microbatches 8 --cost F=1,I=1,W=1,comm=1
    fivefold verify moe_tiny --parallel pp2 --train.microbatches 4 --pipeline.schedule examples/eager_1f1b.py:eager_1f1b
    fivefold train moe_demo --parallel pp4 --train.microbatches 8 --pipeline.schedule examples/eager_1f1b.py:eager_1f1b
"""

from __future__ import annotations

from fivefold.schedule.streams import weave
from fivefold.schedule.table import Table


def eager_1f1b(pp: int, microbatches: int, chunks: int) -> Table:
    """Rank r begins with ``2*(pp-1-r)`` forwards instead of 1F1B's ``pp-1-r``, and holds as many activations more.

    Source: Zhuang et al. 2022, arXiv 2211.05322, section 4.
    """
    if chunks != 1:
        raise ValueError(f"eager_1f1b is a schedule of one chunk, not {chunks}")
    table = []
    for rank in range(pp):
        stream = [(rank, m) for m in range(microbatches)]  # its forwards in order, and its backwards
        table.append(weave(stream, stream, warmup=2 * (pp - 1 - rank)))
    return table
