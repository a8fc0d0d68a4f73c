"""Layout strings: parsing, printing, and what their messages offer instead."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.dims import ParallelDims
from fivefold.config.errors import ConfigError, divisors, not_multiple

SIZE = st.integers(1, 6)


@settings(deadline=None)
@given(pp=SIZE, ddp=SIZE, fsdp=SIZE, cp=SIZE, tp=SIZE, data=st.data())
def test_prints_and_parses(pp, ddp, fsdp, cp, tp, data):
    ep = data.draw(st.sampled_from(divisors(fsdp * cp * tp)))
    etp = data.draw(st.sampled_from(divisors(fsdp * cp * tp // ep)))
    dims = ParallelDims(pp=pp, ddp=ddp, fsdp=fsdp, cp=cp, tp=tp, ep=ep, etp=etp)
    assert ParallelDims.parse(str(dims)) == dims
    assert dims.world == pp * ddp * fsdp * cp * tp
    assert dims.efsdp * ep * etp == fsdp * cp * tp
    assert dims.data == ddp * fsdp


def test_single_and_order():
    assert str(ParallelDims()) == "single"
    assert ParallelDims.parse("single") == ParallelDims()
    assert str(ParallelDims.parse("ep8-tp2-fsdp4-pp2")) == "pp2-fsdp4-tp2-ep8"


def test_star_takes_what_is_left():
    assert ParallelDims.parse("fsdp*-tp2", 8).fsdp == 4
    assert ParallelDims.parse("fsdp*", 1) == ParallelDims()


@pytest.mark.parametrize(
    ("layout", "world", "words"),
    [
        ("fdsp2", None, ["parallel=fdsp2", "'fdsp2'", "Did you mean fsdp2?"]),
        ("fsdp", None, ["'fsdp'", "Did you mean fsdp2?"]),
        ("fsdp2tp2", None, ["'fsdp2tp2'", "joined by '-'"]),
        ("tp2,fsdp2", None, ["'tp2,fsdp2'"]),
        ("", None, ["has ''", "Use single"]),
        ("tp2-tp4", None, ["names tp twice"]),
        ("fsdp*-fsdp2", None, ["names fsdp twice"]),
        ("tp*", None, ["'tp*'"]),
        ("tp0", None, ["tp=0 is below 1"]),
        ("fsdp4-tp2-ep3", None, ["ep=3 does not divide fsdp*cp*tp=8 (fsdp=4, cp=1, tp=2)", "ep in [1, 2, 4, 8]"]),
        ("fsdp4-etp3", None, ["etp=3 does not divide", "etp in [1, 2, 4]"]),
        ("fsdp4-ep2-etp4", None, ["ep*etp=8 does not divide", "With ep=2 use etp in [1, 2]"]),
        ("fsdp*", None, ["not known here", "torchrun"]),
        ("fsdp*-tp3", 4, ["multiply to 3", "4 ranks", "[1, 2, 4]"]),
        ("fsdp2-tp2", 8, ["needs 4 ranks (fsdp2*tp2)", "8 were started", "fsdp4"]),
        ("tp3", 4, ["needs 3 ranks", "4 were started", "Start 3 ranks"]),
    ],
)
def test_messages(layout, world, words):
    with pytest.raises(ConfigError) as caught:
        ParallelDims.parse(layout, world)
    assert all(word in caught.value.problems[0] for word in words), caught.value.problems


def test_every_wrong_word_is_named():
    with pytest.raises(ConfigError) as caught:
        ParallelDims.parse("fdsp2-tpp2-tp2")
    assert len(caught.value.problems) == 2


@settings(deadline=None)
@given(value=st.integers(1, 10_000), a=st.integers(1, 12), b=st.integers(1, 12))
def test_not_multiple_offers_the_nearest(value, a, b):
    found = not_multiple("x", value, {"a": a, "b": b})
    assert bool(found) == bool(value % (a * b))
    if found:
        offered = {int(word.split("=")[-1]) for word in found[0].split("Use ")[1].split(", or")[0].split(" or ")}
        legal = [v for v in range(1, value + a * b + 1) if v % (a * b) == 0]
        below, above = [v for v in legal if v < value][-1:], [v for v in legal if v > value][:1]
        assert offered == {*below, *above}
