"""Drawings to scale: the characters and boxes are where the simulation puts them, and can be told apart."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from fivefold.schedule.draw import FILLS, svg, text
from fivefold.schedule.named import NAMES, build
from fivefold.schedule.simulate import simulate
from fivefold.schedule.table import Table

UNEVEN = {"F": 1.0, "I": 1.3, "W": 0.7}
SVG = "{http://www.w3.org/2000/svg}"


def test_1f1b_by_hand() -> None:
    assert text(build("1f1b", 2, 2)) == (
        "rank 0  F0  F1   .   .  B0 ----  .  B1 ----\n"
        "rank 1   .  F0  B0 ---- F1  B1 ----  .   .\n"
        "\n"
        "F forward, B backward"
    )  # fmt: skip


def test_chunks_are_told_apart() -> None:
    drawn = text(build("zb_v", 2, 2))
    assert drawn.splitlines()[0].startswith("rank 0  F0  F1   .  f0  i0  w0  f1")
    assert drawn.endswith("F forward, I input gradient, W weight gradient, small letters: the rank's second chunk")
    drawn = text(build("interleaved", 2, 2, 3))
    assert drawn.splitlines()[0].startswith("rank 0  F0a  F1a  F0b  F1b  F0c  F1c")
    assert drawn.endswith("after the microbatch: the rank's chunk, a the first")


@pytest.mark.parametrize("cost", [None, UNEVEN])
@pytest.mark.parametrize("name", NAMES)
def test_text_is_to_scale(name: str, cost: dict[str, float] | None) -> None:
    table = build(name, 3, 4)
    options = {} if cost is None else {"cost": cost, "comm": 0.25}
    timeline = simulate(table, **options)
    lines = text(table, **options).splitlines()
    margin = len("rank 0 ")
    columns = max(len(line) for line in lines[:3]) - margin
    for rank, order in enumerate(table):
        line = lines[rank][margin:].lower() + " "
        place = 0
        for action in order:
            place = line.index(f" {action.kind.lower()}{action.microbatch} ", place)
            expected = timeline.start[action] / timeline.makespan * columns
            assert abs(place - expected) <= 2.5, action
            place += 1


def test_a_wide_drawing_goes_on_below() -> None:
    table = build("1f1b", 3, 20)
    whole = text(table).splitlines()
    folded = text(table, width=60).splitlines()
    assert max(map(len, folded)) <= 60
    blocks = [folded[i : i + 3] for i in range(0, len(folded) - 2, 4)]
    assert len(blocks) > 3
    for rank in range(3):
        parts = [block[rank][7:].ljust(50) for block in blocks]
        assert all(block[rank].startswith(f"rank {rank}") for block in blocks)
        assert "".join(parts).rstrip() == whole[rank][7:]
    assert max(map(len, text(table, width=1).splitlines()[:-1])) <= 7 + 5


def test_very_short_actions_do_not_blow_it_up() -> None:
    cost = {"F": 1.0, "I": 1.0, "W": 1e-6}
    assert max(map(len, text(build("zb_h1", 2, 4), cost).splitlines())) < 500
    assert text(build("zb_h1", 2, 2), {"F": 0.0, "I": 0.0, "W": 0.0})


def boxes(picture: str) -> dict[str, tuple[float, float, str, str]]:
    """Each action's left edge, width, colour and label."""
    found = {}
    for group in ElementTree.fromstring(picture).iter(f"{SVG}g"):
        name = group.findtext(f"{SVG}title")
        rect = group.find(f"{SVG}rect")
        assert name is not None
        assert rect is not None
        x, width = float(rect.get("x", "")), float(rect.get("width", ""))
        found[name.split(":")[0]] = (x, width, rect.get("fill", ""), group.findtext(f"{SVG}text") or "")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_svg_is_to_scale(name: str) -> None:
    table = build(name, 3, 4)
    timeline = simulate(table, UNEVEN, 0.25)
    found = boxes(svg(table, UNEVEN, 0.25))
    actions = [a for order in table for a in order]
    assert set(found) == {str(a) for a in actions}
    first = min(actions, key=lambda a: timeline.start[a])
    origin, width = found[str(first)][:2]
    scale = width / (timeline.end[first] - timeline.start[first])
    for a in actions:
        x, width, fill, label = found[str(a)]
        assert x - origin == pytest.approx(timeline.start[a] * scale, abs=0.1)
        assert width == pytest.approx((timeline.end[a] - timeline.start[a]) * scale, abs=0.1)
        assert fill in FILLS[a.kind]
        assert label.upper().startswith(f"{a.kind}{a.microbatch}")


def test_svg_tells_chunks_kinds_and_times() -> None:
    table = build("zb_v", 2, 2)
    picture = svg(table, title="<V> & more")
    found = boxes(picture)
    assert {found["F0.0"][3], found["F3.0"][3]} == {"F0", "f0"}
    assert found["F0.0"][2] != found["F3.0"][2]
    assert len({found[key][2] for key in ("F0.0", "I0.0", "W0.0", "F3.0", "I3.0", "W3.0")}) == 6
    root = ElementTree.fromstring(picture)
    words = [element.text or "" for element in root.iter() if element.tag in (f"{SVG}title", f"{SVG}text")]
    assert words[0] == "<V> & more"
    assert "&lt;V&gt; &amp; more" in picture
    assert any("I3.1: input gradient of microbatch 1 on stage 3, rank 0, " in word for word in words)
    assert any(re.match(r"makespan .*bubble .*span", word) for word in words)


def luminance(colour: str) -> float:
    """Relative luminance as the web's accessibility guidelines define it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))


def test_labels_are_readable_on_every_fill_and_on_the_ground() -> None:
    root = ElementTree.fromstring(svg(build("zb_v", 2, 2)))
    ground = root.find(f"{SVG}rect")
    assert ground is not None
    assert (ground.get("width"), ground.get("height")) == (root.get("width"), root.get("height"))
    ink = luminance(root.get("fill", ""))
    for colour in (ground.get("fill", ""), *(fill for pair in FILLS.values() for fill in pair)):
        assert (luminance(colour) + 0.05) / (ink + 0.05) > 7, colour


def test_one_rank() -> None:
    table: Table = build("1f1b", 1, 2)
    assert text(table).startswith("rank 0  F0  B0 ---- F1  B1 ----\n")
    assert set(boxes(svg(table))) == {"F0.0", "B0.0", "F0.1", "B0.1"}
