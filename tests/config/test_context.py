"""What methods of context parallelism cost, which one auto takes, and what forbids a run."""

from __future__ import annotations

import pytest

from fivefold.config import context
from fivefold.config.dims import ParallelDims
from fivefold.config.errors import ConfigError
from fivefold.config.overrides import apply
from fivefold.config.run import RunConfig
from fivefold.recipes import RECIPES


def configured(recipe: str, parallel: str, **changes: object) -> RunConfig:
    """A recipe with overrides; names have two underscores for each dot."""
    given = {name.replace("__", "."): str(value) for name, value in changes.items()}
    config, wrong = apply(RECIPES[recipe](), given | {"parallel": parallel})
    assert wrong == []
    return config


def priced(recipe: str, parallel: str, **changes: object) -> dict[str, context.MethodCost]:
    config = configured(recipe, parallel, **changes)
    return context.costs(config, config.dims)


def problems(recipe: str, parallel: str, **changes: object) -> list[str]:
    config = configured(recipe, parallel, **changes)
    return context.problems(config, config.dims)


# ---- closed forms at sizes worked out by hand ------------------------------------------------------------------------


def test_grouped_heads() -> None:
    """8 tokens a rank of 16, 8 query and 4 key heads of width 4, in float64: 8 bytes of value and of sum."""
    found = priced("dense_tiny", "cp2", train__dtype="float64")
    assert list(found) == ["ring", "all_gather", "ulysses"]
    block = 8 * 4 * (4 + 4)  # tokens, key heads, widths of key and value
    assert found["ring"].sent_bytes == found["all_gather"].sent_bytes == block * (8 + 8 + 8) == 6144
    swapped = 8 * (8 + 4) * (4 + 4) // 2  # queries, keys, values and result; half of it stays
    assert found["ulysses"].sent_bytes == 2 * swapped * 8 == 6144
    assert [found[name].hidden for name in found] == [True, False, False]
    assert {cost.extra_flops for cost in found.values()} == {0}
    pairs = 16 * 17 / 2 / 2  # of query and key, causal, half of them here
    products = 2 * 8 * (4 + 4) * 3  # multiply and add, heads, widths; forward and twice that backward
    assert {cost.attention_flops for cost in found.values()} == {pairs * products} == {26112}


def test_ranks_and_dtypes() -> None:
    """Four ranks of 4 tokens; two of tp have half the heads each; narrow dtypes sum in 4 bytes."""
    found = priced("dense_tiny", "cp4-tp2", train__dtype="float32", data__sequence_length=32)
    assert list(found) == ["ring", "all_gather"]  # 2 key heads on a rank of tp
    assert found["ring"].sent_bytes == 3 * 8 * 2 * 8 * (4 + 4 + 4)
    narrow = priced("dense_tiny", "cp4-tp2", train__dtype="bfloat16", data__sequence_length=32)
    assert narrow["ring"].sent_bytes == 3 * 8 * 2 * 8 * (2 + 2 + 4)
    many = priced("dense_tiny", "cp4", train__dtype="bfloat16", data__sequence_length=32)
    assert many["ulysses"].sent_bytes == 2 * 3 / 4 * 8 * (8 + 4) * 8 * 2


@pytest.mark.parametrize(("placement", "seen"), [("zigzag", 1 + 3 / 4), ("contiguous", 1 + 1 / 2)])
def test_latent(placement: str, seen: float) -> None:
    """A latent of 8 and a rotary key of 4 for 4 heads of 4 + 4 and values of 4; expanding takes 2*8*4*(4+4) a token."""
    found = priced("moe_tiny", "cp2", train__dtype="float64", context__placement=placement)
    assert list(found) == ["ring", "all_gather", "ulysses", "latent"]
    assert found["ring"].sent_bytes == 8 * 4 * (8 + 4) * 24
    assert found["latent"].sent_bytes == 8 * (8 + 4) * 24
    assert found["latent"].hidden
    expanding = 8 * 2 * 8 * 4 * (4 + 4)
    assert found["latent"].extra_flops == pytest.approx(expanding * (4 * seen - 3))  # 4 a block seen, 3 anyway
    assert found["ring"].extra_flops == 0


@pytest.mark.parametrize(("tp", "values", "ratio"), [(1, 40_960, 71.1), (8, 5_120, 8.9)])
def test_deepseek_v3_sends_fewer_latents_than_keys(tp: int, values: int, ratio: float) -> None:
    """128 heads of 192 and 128 values, against 512 of latent and 64 of rotary key."""
    found = priced("deepseek_v3", f"cp8-tp{tp}", train__dtype="bfloat16", data__sequence_length=32768)
    tokens, bytes_each = 7 * 4096, 2 + 2 + 4
    assert found["ring"].sent_bytes == tokens * values * bytes_each
    assert found["latent"].sent_bytes == tokens * 576 * bytes_each
    assert found["ring"].sent_bytes / found["latent"].sent_bytes == pytest.approx(ratio, abs=0.05)
    expanding = 2 * 4096 * 512 * (128 // tp) * (128 + 128)
    assert found["latent"].extra_flops == (4 * (1 + 3 / 4 * 7) - 3) * expanding


def test_seconds() -> None:
    """What is hidden takes the longer of the two times, what is not their sum."""
    cost = {"sent_bytes": 6e9, "extra_flops": 1e12, "attention_flops": 3e12}
    assert context.MethodCost(**cost, hidden=True).seconds(2e9, 1e12) == 4
    assert context.MethodCost(**cost, hidden=True).seconds(1e9, 1e12) == 6
    assert context.MethodCost(**cost, hidden=False).seconds(2e9, 1e12) == 7


def test_one_rank_sends_nothing() -> None:
    assert {cost.sent_bytes for cost in priced("moe_tiny", "tp2").values()} == {0}


# ---- auto ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "length", "link", "method"),
    [
        ("cp8", 2**20, 50, "ring"),  # attention hides it all, so nothing extra is worth computing
        ("cp8", 2**20, 0.5, "latent"),
        ("cp8", 2**12, 50, "latent"),  # a short row's attention hides little
        ("cp8", 2**12, 0.5, "latent"),
        ("cp8", 2**12, 1000, "ulysses"),  # sends less than ring, and computes less than latent
        ("cp8", 2**12, 100_000, "ring"),  # what travels is as good as free
        ("cp8-tp8", 2**20, 50, "ring"),
        ("cp8-tp8", 2**12, 50, "latent"),
    ],
)
def test_auto_on_the_deepseek_v3_shape(parallel: str, length: int, link: float, method: str) -> None:
    config = configured("deepseek_v3", parallel, data__sequence_length=length, context__link_gb_per_s=link,
                        train__dtype="bfloat16")  # fmt: skip
    assert context.method(config) == method


@pytest.mark.parametrize(
    ("length", "link", "method"), [(2**17, 50, "ring"), (2**12, 50, "ulysses"), (2**17, 0.5, "ulysses")]
)
def test_auto_on_the_llama_shape(length: int, link: float, method: str) -> None:
    config = configured("llama3_8b", "cp4", data__sequence_length=length, context__link_gb_per_s=link,
                        train__dtype="bfloat16")  # fmt: skip
    assert context.method(config) == method


def test_auto_takes_what_the_heads_allow() -> None:
    """Of 8 key heads 16 ranks get none, so that whole rows are no choice."""
    config = configured("llama3_8b", "cp16", data__sequence_length=131072, context__link_gb_per_s=0.1)
    assert "ulysses" not in context.able(config, config.dims)
    assert context.method(config) == "ring"


def test_what_is_named_is_taken() -> None:
    assert context.method(configured("deepseek_v3", "cp8", context__method="all_gather")) == "all_gather"
    assert context.method(configured("dense_tiny", "cp2", context__method="a.py:b")) == "a.py:b"


# ---- what forbids a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "placement", "multiple"),
    [
        ("cp2", "zigzag", 4),
        ("cp2", "balanced", 4),
        ("cp2", "contiguous", 2),
        ("cp4", "zigzag", 8),
        ("cp2-tp2", "zigzag", 8),
        ("cp2-tp2", "contiguous", 4),
        ("fsdp2-cp4-tp2", "balanced", 16),
        ("cp3", "contiguous", 3),
    ],
)
def test_lengths(parallel: str, placement: str, multiple: int) -> None:
    """Exactly the multiples are legal, and a message names the nearest of them."""
    for length in range(1, 3 * multiple + 1):
        found = problems("moe_tiny", parallel, data__sequence_length=length, context__placement=placement)
        assert (not found) == (length % multiple == 0), (length, found)
        if found:
            below = length // multiple * multiple
            legal = f"{below} or {below + multiple}" if below else f"{multiple}"
            assert len(found) == 1
            assert f"data.sequence_length={length} is not a multiple of" in found[0]
            assert f"={multiple} (" in found[0]
            assert f"context.placement={placement})" in found[0]
            assert f"Use data.sequence_length={legal}" in found[0]
            assert ("or context.placement=contiguous" in found[0]) == (length % multiple == multiple // 2
                                                                       and placement != "contiguous")  # fmt: skip


def test_whole_rows_have_any_length() -> None:
    assert problems("moe_tiny", "fsdp2-tp2", data__sequence_length=15) == []  # tp's rule is the model's


@pytest.mark.parametrize("parallel", ["cp2", "cp4", "cp2-tp2", "cp2-tp4", "cp4-tp2", "cp3", "cp8"])
@pytest.mark.parametrize(("recipe", "heads"), [("moe_tiny", 4), ("dense_tiny", 4)])
def test_ulysses_where_heads_divide(recipe: str, heads: int, parallel: str) -> None:
    dims = ParallelDims.parse(parallel)
    found = problems(recipe, parallel, data__sequence_length=48, context__method="ulysses")
    assert (not found) == (heads % (dims.cp * dims.tp) == 0)
    config = configured(recipe, parallel)
    assert ("ulysses" in context.able(config, dims)) == (not found)
    if found:
        legal = [n for n in (1, 2, 4) if n * dims.tp <= 4]
        assert f"cp*tp={dims.cp * dims.tp} divides" in found[0]
        assert f"Use cp in {legal}, or context.method in ring, all_gather" in found[0]


def test_a_users_own(tmp_path) -> None:
    """Its file and function must be there; of its placement no more is asked than equally many tokens a rank."""
    path = tmp_path / "own.py"
    path.write_text("def mine(*_):\n    return None\n")
    own = f"{path}:mine"
    assert problems("moe_tiny", "cp2", context__method=own, context__placement=own, data__sequence_length=14) == []
    found = problems("moe_tiny", "cp2", context__placement=own, data__sequence_length=15)
    assert f"is not a multiple of cp=2 (cp=2, context.placement={own})" in found[0]
    both = problems("moe_tiny", "cp2", context__method=f"{path}:nobody", context__placement=f"{tmp_path}/no.py:mine")
    assert ["has no nobody" in both[0], "no.py does not exist" in both[1], len(both)] == [True, True, 2]


def test_all_problems_at_once() -> None:
    found = problems("dense_tiny", "cp2", context__method="latent", context__placement="zig", data__sequence_length=15)
    assert [text.split("=")[0] for text in found] == ["context.placement", "data.sequence_length", "context.method"]


def test_a_layout_of_unknown_size_has_no_method() -> None:
    with pytest.raises(ConfigError):
        context.method(configured("moe_tiny", "fsdp*-cp2"))
