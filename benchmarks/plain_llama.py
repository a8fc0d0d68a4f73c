"""A Llama in plain PyTorch for one process: the yardstick. Nothing of Fivefold is used here.

Letters: B sequences, T tokens, H heads, E width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, LAYERS, HEADS, FFN, VOCAB, THETA = 256, 6, 16, 768, 2048, 500_000.0


def rotations(length: int, width: int, theta: float) -> Tensor:
    """Unit complex numbers ``[T, E/2]`` that turn neighbouring values by their position."""
    frequency = 1 / theta ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(length).float(), frequency)
    return torch.polar(torch.ones_like(angles), angles)


def turn(x: Tensor, rotation: Tensor) -> Tensor:
    """``x`` ``[B, T, H, E]`` turned by ``rotation`` ``[T, E/2]``."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation[None, :, None]).flatten(3).type_as(x)


class Attention(nn.Module):
    """Causal attention, queries, keys and values from one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, DIM // HEADS).unbind(2)
        q, k = turn(q, rotation), turn(k, rotation)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, DIM))


class FeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(DIM, FFN, bias=False), nn.Linear(DIM, FFN, bias=False)
        self.down = nn.Linear(FFN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and a feed-forward, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention, self.ffn = Attention(), FeedForward()

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), rotation)
        return x + self.ffn(self.norm2(x))


class Llama(nn.Module):
    """Token ids ``[B, T]`` to logits ``[B, T, V]``."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.rotation = rotations(length, DIM // HEADS, THETA)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.rotation)
        return self.head(self.norm(x))

    def after_step(self) -> None:
        """Nothing: this model changes only by its gradients."""
