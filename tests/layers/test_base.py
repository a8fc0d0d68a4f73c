"""A layer's table of cuts, and what a wrong one is told."""

from __future__ import annotations

import pytest

from fivefold.layers.base import Layer
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.parameter import Init, spec_of
from fivefold.mesh.run import Run


def declared(sharding, shape=(4, 6)):
    layer = type("Mine", (Layer,), {"SHARDING": sharding})(Run(Mesh.single()))
    layer.declare("weight", shape, Init())
    return layer


def test_a_parameter_is_cut_as_the_table_says():
    p = declared({"weight": ("tp", None)}).weight
    assert spec_of(p).sharding == ("tp", None)
    assert p.shape == (4, 6)
    assert p.is_meta


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        ({}, r"Mine\.SHARDING does not name 'weight'\. Add it, with an axis or None for each dim of \(4, 6\)"),
        ({"weight": ("tq", None)}, r"Mine\.SHARDING\['weight'\]=\('tq', None\) does not fit .*tp"),
        ({"weight": ("tp",)}, r"Mine\.SHARDING\['weight'\]=\('tp',\) does not fit the dims of \(4, 6\)"),
    ],
)
def test_a_wrong_table_is_named(sharding, message):
    with pytest.raises(ValueError, match=message):
        declared(sharding)
