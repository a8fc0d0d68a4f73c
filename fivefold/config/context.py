"""Context parallelism known without torch: what forbids it, what each method moves and computes, and which is fastest.

Letters: T tokens of a row, n ranks of cp, t = T/n, H query and G key heads of a rank of tp, E and V widths of a head's
key and value, N and R those of MLA's key without position and rotary key, L its latent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import locate
from .dims import ParallelDims
from .errors import ConfigError, divisors, nearest
from .model import DecoderConfig, GqaConfig, MlaConfig
from .run import RunConfig

METHODS = ("ring", "all_gather", "ulysses", "latent")
"""By name, those that are equally fast from the first to the last."""
PLACEMENTS = ("zigzag", "contiguous", "balanced")

# ---- what forbids a run ----------------------------------------------------------------------------------------------


def problems(config: RunConfig, dims: ParallelDims) -> list[str]:
    """What forbids the context settings of ``config``, one message each."""
    method, placement = config.context.method, config.context.placement
    found = _unknown("context.method", method, (*METHODS, "auto"))
    found += _unknown("context.placement", placement, PLACEMENTS)
    found += _sequence(config, dims) if dims.cp > 1 else []
    if isinstance(config.model, DecoderConfig):
        attention = config.model.attention
        if method == "latent" and attention.kind != "mla":
            found.append(
                f"context.method=latent exchanges MLA's latent, and this model has none "
                f"(model.attention.kind={attention.kind}). Use context.method in {', '.join(able(config, dims))}."
            )
        if method == "ulysses" and dims.cp > 1 and not _divides_heads(attention, dims):
            found.append(_heads(config, attention, dims))
    return found


def _unknown(key: str, value: str, names: tuple[str, ...]) -> list[str]:
    if value in names:
        return []
    if ":" in value:
        try:
            locate.function(value, key)
        except ConfigError as error:
            return list(error.problems)
        return []
    close = nearest(value, names)
    hint = f" Did you mean {close}?" if close else ""
    return [f"{key}={value} is not one of the choices.{hint} Use {', '.join(names)}, or path/file.py:function."]


def _sequence(config: RunConfig, dims: ParallelDims) -> list[str]:
    """Rows that cannot be cut into as many pieces as the placement needs, each with a share for every rank of ``tp``.

    Of a user's own placement only that ranks hold equally many tokens is known.
    """
    length, placement = config.data.sequence_length, config.context.placement
    factors = {"cp": dims.cp, "tp": dims.tp} if dims.tp > 1 else {"cp": dims.cp}
    pieces = 2 if placement in ("zigzag", "balanced") else 1
    product = pieces * math.prod(factors.values())
    if length % product == 0:
        return []
    name = "*".join([*(["2"] if pieces == 2 else []), *factors])
    sizes = ", ".join(f"{axis}={size}" for axis, size in factors.items())
    below = length // product * product
    legal = f"{below} or {below + product}" if below else f"{product}"
    other = ", or context.placement=contiguous" if pieces == 2 and length % (product // 2) == 0 else ""
    return [
        f"data.sequence_length={length} is not a multiple of {name}={product} ({sizes}, "
        f"context.placement={placement}). Use data.sequence_length={legal}{other}."
    ]


def _divides_heads(attention: GqaConfig | MlaConfig, dims: ParallelDims) -> bool:
    return all(heads % (dims.tp * dims.cp) == 0 for heads in _head_counts(attention).values())


def _head_counts(attention: GqaConfig | MlaConfig) -> dict[str, int]:
    if attention.kind == "mla":
        return {"n_heads": attention.n_heads}
    return {"n_heads": attention.n_heads, "n_kv_heads": attention.n_kv_heads}


def _heads(config: RunConfig, attention: GqaConfig | MlaConfig, dims: ParallelDims) -> str:
    counts = _head_counts(attention)
    sizes = ", ".join(f"model.attention.{name}={n}" for name, n in counts.items())
    fewest = math.gcd(*counts.values())
    legal = divisors(fewest // dims.tp) if fewest % dims.tp == 0 else [1]
    others = [m for m in able(config, dims) if m != "ulysses"]
    return (
        f"context.method=ulysses needs heads that cp*tp={dims.cp * dims.tp} divides "
        f"(cp={dims.cp}, tp={dims.tp}, {sizes}). Use cp in {legal}, or context.method in {', '.join(others)}."
    )


# ---- what methods cost -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MethodCost:
    """One attention layer and row on one rank, forward and backward."""

    sent_bytes: float
    """What the rank sends."""
    extra_flops: float
    """Operations beyond what all methods do."""
    hidden: bool
    """Whether what travels does so while the rank computes."""
    attention_flops: float
    """What all methods do for scores and values, as ``counts.part_flops`` counts."""

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Estimated time."""
        moving, computing = self.sent_bytes / bytes_per_s, (self.attention_flops + self.extra_flops) / flops_per_s
        return max(moving, computing) if self.hidden else moving + computing


def able(config: RunConfig, dims: ParallelDims) -> tuple[str, ...]:
    """The methods that the model can use under ``dims``."""
    if not isinstance(config.model, DecoderConfig):
        return ("ring", "all_gather")
    attention = config.model.attention
    found = ["ring", "all_gather"]
    found += ["ulysses"] if _divides_heads(attention, dims) else []
    found += ["latent"] if attention.kind == "mla" else []
    return tuple(found)


def costs(config: RunConfig, dims: ParallelDims) -> dict[str, MethodCost]:
    """Cost of each method that the decoder can use; formulas in ``docs/context.md``.

    Ring and all-gather send n-1 blocks of t keys and values forward, again backward, and as many gradients in the dtype
    sums have. Ulysses sends (n-1)/n of queries, keys, values and results in each direction. The latent's ring sends
    blocks of latent and rotary key, and each rank expands what it sees of every block: with zigzag all of its own and
    3/4 of the others', forward, again backward, and with two products for the gradients.
    """
    assert isinstance(config.model, DecoderConfig)
    a, n, t = config.model.attention, dims.cp, config.data.sequence_length // dims.cp
    heads = a.n_heads // dims.tp
    if a.kind == "mla":
        kv_heads, key, value = heads, a.nope_dim + a.rope_dim, a.v_dim
    else:
        kv_heads, key, value = a.n_kv_heads // dims.tp, a.head_dim, a.head_dim
    size = 8 if config.train.dtype == "float64" else 4 if config.train.dtype == "float32" else 2
    wide = max(size, 4)
    attention = 3 * heads * (key + value) * (config.data.sequence_length + 1) * t
    block = (n - 1) * t * kv_heads * (key + value) * (2 * size + wide)
    swapped = 2 * (n - 1) / n * t * (heads + kv_heads) * (key + value) * size
    found = {
        "ring": MethodCost(sent_bytes=block, extra_flops=0, hidden=True, attention_flops=attention),
        "all_gather": MethodCost(sent_bytes=block, extra_flops=0, hidden=False, attention_flops=attention),
        "ulysses": MethodCost(sent_bytes=swapped, extra_flops=0, hidden=False, attention_flops=attention),
    }
    if a.kind == "mla":
        latent = (n - 1) * t * (a.kv_rank + a.rope_dim) * (2 * size + wide)
        product = 2 * t * a.kv_rank * heads * (a.nope_dim + a.v_dim)
        seen = 1 + {"zigzag": 0.75}.get(config.context.placement, 0.5) * (n - 1)
        found["latent"] = MethodCost(sent_bytes=latent, extra_flops=product * (4 * seen - 3), hidden=True,
                                     attention_flops=attention)  # fmt: skip
    return {name: cost for name, cost in found.items() if name in able(config, dims)}


def method(config: RunConfig) -> str:
    """``context.method`` with auto resolved: the method of least estimated time, of equals the first of ``METHODS``.

    Raises:
        ConfigError: if ``parallel`` is not a layout of known size.
    """
    if config.context.method != "auto":
        return config.context.method
    if not isinstance(config.model, DecoderConfig):
        return "ring"
    rates = config.context.link_gb_per_s * 1e9, config.context.tflops * 1e12
    found = costs(config, config.dims)
    return min(found, key=lambda name: (found[name].seconds(*rates), METHODS.index(name)))
