"""Closed forms for a decoder: parameters, floating-point operations, cache. No torch, no model is built.

Letters: D dim, V vocab_size, L n_layers, H n_heads, K n_kv_heads, A head_dim, F ffn_dim, E n_experts, k top_k,
M expert_dim, T sequence_length. MLA: q and c the ranks of query and key-value, n, r, v the widths of the part without
position, the rotary part and the value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model import DecoderConfig, GqaConfig, MlaConfig, MoeConfig


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Parameters of one part, by what a token does with them."""

    matrices: int = 0
    """Elements of matrices every token is multiplied with."""
    idle: int = 0
    """Elements of the routed experts a token is not sent to."""
    vectors: int = 0
    """Elements of norms."""

    def __add__(self, other: Weights) -> Weights:
        return Weights(
            matrices=self.matrices + other.matrices,
            idle=self.idle + other.idle,
            vectors=self.vectors + other.vectors,
        )

    def __mul__(self, times: int) -> Weights:
        return Weights(matrices=self.matrices * times, idle=self.idle * times, vectors=self.vectors * times)


def attention_weights(attention: GqaConfig | MlaConfig, dim: int) -> Weights:
    """Parameters of one attention.

    Grouped-query: query and output D*H*A each, key and value D*K*A each. MLA: the query is D*H*(n+r) straight, or
    D*q + q*H*(n+r) and a norm of q when compressed; key and value are D*(c+r) down and c*H*(n+v) up, with a norm of
    c; the output is H*v*D.
    """
    a = attention
    if a.kind == "gqa":
        return Weights(matrices=2 * dim * a.head_dim * (a.n_heads + a.n_kv_heads))
    query = a.n_heads * (a.nope_dim + a.rope_dim)
    query = a.q_rank * (dim + query) if a.q_rank else dim * query
    down = dim * (a.kv_rank + a.rope_dim)
    up = a.kv_rank * a.n_heads * (a.nope_dim + a.v_dim)
    return Weights(matrices=query + down + up + a.n_heads * a.v_dim * dim, vectors=a.q_rank + a.kv_rank)


def moe_weights(moe: MoeConfig, dim: int) -> Weights:
    """Parameters of one mixture of experts: 3*D*M an expert, of which k routed and all shared act, and the router D*E.

    The routing bias moves by its own rule and not by a gradient: it is state, not a parameter, and not counted.
    """
    expert = 3 * dim * moe.expert_dim
    active = expert * (moe.top_k + moe.n_shared) + dim * moe.n_experts
    return Weights(matrices=active, idle=expert * (moe.n_experts - moe.top_k))


def decoder_weights(model: DecoderConfig) -> Weights:
    """Parameters of the blocks, the last norm and the head; without the embedding, which is looked up."""
    dense = model.n_layers if model.moe is None else min(model.moe.n_dense_layers, model.n_layers)
    total = (attention_weights(model.attention, model.dim) + Weights(vectors=2 * model.dim)) * model.n_layers
    total += Weights(matrices=3 * model.dim * model.ffn_dim) * dense
    if model.moe is not None:
        total += moe_weights(model.moe, model.dim) * (model.n_layers - dense)
    return total + Weights(matrices=model.vocab_size * model.dim, vectors=model.dim)


def parameters(model: DecoderConfig) -> int:
    """All parameters: embedding V*D, blocks, norms, and the head V*D unless it is the embedding."""
    weights = decoder_weights(model)
    embedding = 0 if model.tied else model.vocab_size * model.dim
    return embedding + weights.matrices + weights.idle + weights.vectors


def active_parameters(model: DecoderConfig) -> int:
    """Parameters that take part in one token's forward.

    The embedding, of which a token reads one row, is left out; the head is in, and of the experts the k routed ones
    and the shared ones.
    """
    weights = decoder_weights(model)
    return weights.matrices + weights.vectors


def part_flops(model: DecoderConfig, sequence_length: int) -> dict[str, float]:
    """Floating-point operations of forward and backward for one token of a sequence of T, causal, by part.

    A matrix costs a token 2 operations an element forward (multiply and add) and twice that backward (the gradients
    of input and weight): 6 an active element. Attention multiplies each query with its keys and the probabilities
    with their values, widths w_k and w_v: 2*(w_k + w_v) operations a head and key forward, three times that in all.
    The token at position t sees t+1 keys, (T+1)/2 on average, so a layer adds 3 * 2*H*(w_k + w_v)*(T+1)/2. The
    embedding copies a row of D values forward and adds D values backward, taken as an operation each: 2*D. Norms,
    rotary positions, softmax, and recomputed activations are not counted.
    """
    a, dim = model.attention, model.dim
    widths = 2 * a.head_dim if a.kind == "gqa" else a.nope_dim + a.rope_dim + a.v_dim
    attention = 6 * attention_weights(a, dim).matrices + 3 * a.n_heads * widths * (sequence_length + 1)
    dense = 6 * 3 * dim * model.ffn_dim
    experts = 6 * moe_weights(model.moe, dim).matrices if model.moe is not None else 0
    layers = {f"layers.{i}": float(attention + (experts if model.is_moe(i) else dense)) for i in range(model.n_layers)}
    return {"embed": 2.0 * dim, **layers, "head": 6.0 * model.vocab_size * dim}


def flops_per_token(model: DecoderConfig, sequence_length: int) -> float:
    """The operations of all parts but the embedding, whose look-up multiplies nothing; see ``part_flops``."""
    return sum(cost for name, cost in part_flops(model, sequence_length).items() if name != "embed")


def kv_cache_bytes(model: DecoderConfig, value_bytes: int = 2) -> int:
    """Bytes of cache one token leaves for later ones: K keys and K values of A, or MLA's latent c and rotary key r."""
    a = model.attention
    values = 2 * a.n_kv_heads * a.head_dim if a.kind == "gqa" else a.kv_rank + a.rope_dim
    return values * value_bytes * model.n_layers
