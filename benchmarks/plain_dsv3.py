"""A DeepSeek-V3-like mixture of experts in plain PyTorch for one process: the yardstick. Nothing of Fivefold is used.

Letters: B sequences, T tokens, H heads, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, LAYERS, DENSE_LAYERS, HEADS, FFN, VOCAB, THETA = 256, 6, 1, 8, 768, 2048, 10_000.0
LATENT, NOPE, ROTARY, VALUE = 64, 32, 16, 32
EXPERTS, TOP_K, EXPERT_FFN, BIAS_RATE = 8, 2, 128, 1e-3


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A matrix without bias."""
    return nn.Linear(inputs, outputs, bias=False)


class Rotation(nn.Module):
    """Turns neighbouring values of ``[B, T, H, ROTARY]`` by their position."""

    def __init__(self, length: int) -> None:
        super().__init__()
        frequency = 1 / THETA ** (torch.arange(0, ROTARY, 2).float() / ROTARY)
        angles = torch.outer(torch.arange(length).float(), frequency)
        self.unit = torch.polar(torch.ones_like(angles), angles)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.unit[None, :, None]).flatten(3)


class LatentAttention(nn.Module):
    """Attention whose keys and values come from one latent per token."""

    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        self.rotation = rotation
        self.q, self.kv_down = linear(DIM, HEADS * (NOPE + ROTARY)), linear(DIM, LATENT + ROTARY)
        self.kv_norm, self.kv_up = nn.RMSNorm(LATENT), linear(LATENT, HEADS * (NOPE + VALUE))
        self.out = linear(HEADS * VALUE, DIM)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q_nope, q_rope = self.q(x).view(b, t, HEADS, -1).split([NOPE, ROTARY], -1)
        q = torch.cat([q_nope, self.rotation(q_rope)], -1)
        latent, key = self.kv_down(x).split([LATENT, ROTARY], -1)
        key = self.rotation(key.unsqueeze(2))
        k_nope, v = self.kv_up(self.kv_norm(latent)).view(b, t, HEADS, -1).split([NOPE, VALUE], -1)
        k = torch.cat([k_nope, key.expand(-1, -1, HEADS, -1)], -1)
        v = F.pad(v, (0, NOPE + ROTARY - VALUE))  # the fused kernel wants one width
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.out(y[..., :VALUE].transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = linear(DIM, hidden), linear(DIM, hidden), linear(hidden, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """A shared expert, and for each token the two routed experts that score highest with their bias."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared = linear(DIM, EXPERTS), FeedForward(EXPERT_FFN)
        self.gate = nn.Parameter(torch.randn(EXPERTS, EXPERT_FFN, DIM) * 0.02)
        self.up = nn.Parameter(torch.randn(EXPERTS, EXPERT_FFN, DIM) * 0.02)
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, EXPERT_FFN) * 0.02)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.view(-1, DIM)
        scores = self.router(x).softmax(-1)
        chosen = (scores + self.bias).topk(TOP_K, sorted=False)[1]
        weights = scores.gather(1, chosen)
        flat = chosen.view(-1)
        counts = torch.bincount(flat, minlength=EXPERTS)
        self.load += counts
        order = flat.argsort(stable=True)
        token, ends = order // TOP_K, counts.cumsum(0, dtype=torch.int32)
        h = x[token]
        gate, up = (F.grouped_mm(h, w.transpose(1, 2), offs=ends) for w in (self.gate, self.up))
        y = F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        out = self.shared(x).index_add(0, token, y * weights.view(-1)[order, None])
        return out.view(shape)

    def balance(self) -> None:
        """Move each expert's bias towards an even load."""
        move = BIAS_RATE * torch.sign(self.load.mean() - self.load)
        self.bias += move - move.mean()
        self.load.zero_()


class Block(nn.Module):
    """Attention and a feed-forward or experts, each after a norm."""

    def __init__(self, index: int, rotation: Rotation) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.RMSNorm(DIM), nn.RMSNorm(DIM), LatentAttention(rotation)
        self.ffn = FeedForward(FFN) if index < DENSE_LAYERS else Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class Deepseek(nn.Module):
    """Token ids ``[B, T]`` to logits ``[B, T, V]``."""

    def __init__(self, length: int) -> None:
        super().__init__()
        rotation = Rotation(length)
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Block(i, rotation) for i in range(LAYERS)])
        self.norm, self.head = nn.RMSNorm(DIM), linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def after_step(self) -> None:
        """Balance the experts of every layer."""
        for layer in self.layers:
            if isinstance(layer.ffn, Experts):
                layer.ffn.balance()
