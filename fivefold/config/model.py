"""The shape of a decoder: everything about the model that is not about how it is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from . import counts, decoder_check
from .base import Part
from .dims import ParallelDims


class ModelConfig(Part):
    """What ``fivefold`` needs to know of any model: who builds it, and the size of its vocabulary.

    A model of your own subclasses this, names its builder, and adds its fields.
    """

    builder: str
    """Function ``module:function`` or ``path/file.py:function`` that returns the model's named parts."""
    vocab_size: PositiveInt
    """Number of token ids; the tokenizer's may be smaller."""

    def flops_per_token(self, sequence_length: int) -> float | None:
        """Floating-point operations of forward and backward for one token, or None to count ``6 * parameters``."""
        return None

    def part_costs(self, sequence_length: int) -> dict[str, float] | None:
        """The names of all parts, first to last, with what each costs a token relative to the others.

        Pipeline stages are cut by it. None where it is not known: the model then runs as one stage.
        """
        return None

    def problems(self, dims: ParallelDims, sequence_length: int) -> list[str]:
        """What forbids this model under the layout ``dims``, one message each; known without torch."""
        return []


class YarnConfig(Part):
    """YaRN context extension. Source: Peng et al. 2023, arXiv 2309.00071; DeepSeek-V2, arXiv 2405.04434."""

    kind: Literal["yarn"] = "yarn"
    """Names this kind of scaling."""
    factor: Annotated[float, Field(ge=1)] = 40.0
    """Extended context length over the original one."""
    original_length: PositiveInt = 4096
    """Sequence length the model was trained at before extension, in tokens."""
    beta_fast: PositiveFloat = 32.0
    """Frequencies that turn more often than this in the original length stay as they are."""
    beta_slow: PositiveFloat = 1.0
    """Frequencies that turn less often than this are divided by ``factor``."""
    mscale: NonNegativeFloat = 1.0
    """Strength of the correction on cos and sin: they are multiplied by m(mscale)/m(mscale_all_dim)."""
    mscale_all_dim: NonNegativeFloat = 0.0
    """Strength of the correction on the softmax scale: it is multiplied by m(mscale_all_dim) squared."""


class Llama3Config(Part):
    """Llama 3.1's frequency scaling. Source: the Llama 3 herd of models, arXiv 2407.21783, and its released code."""

    kind: Literal["llama3"] = "llama3"
    """Names this kind of scaling."""
    factor: Annotated[float, Field(ge=1)] = 8.0
    """Divisor of the low frequencies."""
    low_freq_factor: PositiveFloat = 1.0
    """Wavelengths above original_length over this are divided by ``factor``."""
    high_freq_factor: PositiveFloat = 4.0
    """Wavelengths below original_length over this stay as they are."""
    original_length: PositiveInt = 8192
    """Sequence length the model was trained at before extension, in tokens."""


class RopeConfig(Part):
    """Rotary position embedding. Source: Su et al. 2021, arXiv 2104.09864."""

    theta: PositiveFloat = 10_000.0
    """Base of the geometric series of wavelengths."""
    layout: Literal["interleaved", "half"] = "interleaved"
    """Which values turn together: neighbours (2i, 2i+1), or halves (i, i + R/2)."""
    scaling: Annotated[YarnConfig | Llama3Config, Field(discriminator="kind")] | None = None
    """How the frequencies change for contexts longer than trained; None for plain rotary embedding."""


class GqaConfig(Part):
    """Grouped-query attention. Source: Ainslie et al. 2023, arXiv 2305.13245."""

    kind: Literal["gqa"] = "gqa"
    """Names this kind of attention."""
    n_heads: PositiveInt
    """Query heads."""
    n_kv_heads: PositiveInt
    """Key and value heads, each shared by n_heads/n_kv_heads query heads."""
    head_dim: PositiveInt
    """Width of one head."""


class MlaConfig(Part):
    """Multi-head latent attention. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1."""

    kind: Literal["mla"] = "mla"
    """Names this kind of attention."""
    n_heads: PositiveInt
    """Heads."""
    q_rank: NonNegativeInt = 0
    """Width of the compressed query; 0 projects queries straight from the hidden state."""
    kv_rank: PositiveInt
    """Width of the latent that keys and values are expanded from."""
    nope_dim: PositiveInt
    """Width of the part of a head's key that carries no position."""
    rope_dim: PositiveInt
    """Width of the rotary part of the key, shared by all heads."""
    v_dim: PositiveInt
    """Width of one head's value."""
    latent_norm_eps: PositiveFloat = 1e-6
    """Epsilon of the two norms inside the compression."""


class MoeConfig(Part):
    """Mixture of experts. Source: DeepSeekMoE, arXiv 2401.06066; DeepSeek-V3, arXiv 2412.19437, section 2.1.2."""

    n_experts: PositiveInt
    """Routed experts."""
    top_k: PositiveInt
    """Routed experts each token visits."""
    n_shared: NonNegativeInt = 1
    """Shared experts every token visits; they are one feed-forward of n_shared*expert_dim."""
    expert_dim: PositiveInt
    """Hidden width of one expert."""
    n_dense_layers: NonNegativeInt = 1
    """Leading layers that keep a dense feed-forward."""
    score: Literal["sigmoid", "softmax"] = "sigmoid"
    """What turns router logits into scores."""
    normalise: bool = True
    """Whether the chosen scores are divided by their sum."""
    route_scale: PositiveFloat = 1.0
    """Factor on the weights of the routed experts."""
    score_before: bool = False
    """Whether a token is weighted before its expert instead of after it."""
    n_groups: PositiveInt = 1
    """Groups the experts are divided into for group-limited routing."""
    top_groups: PositiveInt = 1
    """Groups a token may choose its experts from."""
    group_score: Literal["max", "top2_sum"] = "top2_sum"
    """A group's score: its best expert's (DeepSeek-V2), or the sum of its best two (DeepSeek-V3)."""
    bias_rate: NonNegativeFloat = 0.001
    """How far each expert's routing bias moves after a step; 0 turns balancing by bias off."""
    bias_off_layers: tuple[NonNegativeInt, ...] = ()
    """Layers whose routing bias stays where it is."""
    balance_loss: NonNegativeFloat = 0.0
    """Weight of the sequence-wise balance loss; 0 leaves it out."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the router z-loss; 0 leaves it out. Source: ST-MoE, arXiv 2202.08906."""


class InitConfig(Part):
    """Initial weights: a normal distribution cut at three standard deviations."""

    std: PositiveFloat | None = None
    """Standard deviation of every matrix; None takes 1/sqrt(fan-in) per matrix."""
    depth_scaling: bool = True
    """Whether the matrices that write to the residual stream are divided by sqrt(2 * n_layers)."""


class DecoderConfig(ModelConfig):
    """A decoder: embedding, blocks of attention and feed-forward, head. Llama 3 and DeepSeek-V3 are instances."""

    builder: str = "fivefold.models.decoder:build"
    """Function that builds the model's named parts."""
    dim: PositiveInt
    """Width of the residual stream."""
    n_layers: PositiveInt
    """Blocks."""
    ffn_dim: PositiveInt
    """Hidden width of the dense feed-forward."""
    attention: Annotated[GqaConfig | MlaConfig, Field(discriminator="kind")]
    """The attention of every block."""
    moe: MoeConfig | None = None
    """Experts in place of the feed-forward of the later layers; None for a dense model."""
    rope: RopeConfig = RopeConfig()
    """Positions."""
    norm_eps: PositiveFloat = 1e-6
    """Epsilon of the norms."""
    tied: bool = False
    """Whether head and embedding are one matrix."""
    init: InitConfig = InitConfig()
    """Initial weights."""

    def is_moe(self, layer: int) -> bool:
        """Whether block ``layer`` has experts."""
        return self.moe is not None and layer >= self.moe.n_dense_layers

    def flops_per_token(self, sequence_length: int) -> float:
        """Floating-point operations of forward and backward for one token; see ``counts.flops_per_token``."""
        return counts.flops_per_token(self, sequence_length)

    def part_costs(self, sequence_length: int) -> dict[str, float]:
        """Operations of forward and backward for one token, by part; see ``counts.part_flops``."""
        return counts.part_flops(self, sequence_length)

    def problems(self, dims: ParallelDims, sequence_length: int) -> list[str]:
        """Heads, widths, experts and sequence that do not fit each other or the layout, one message each."""
        return decoder_check.problems(self, dims, sequence_length)
