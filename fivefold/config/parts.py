"""The groups of a run's configuration beside the model: data, optimizer, training, pipeline, communication, reports."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from .base import Part

Fraction = Annotated[float, Field(ge=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["float64", "float32", "bfloat16"]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]


class DataConfig(Part):
    """What the run reads, and in which portions."""

    files: tuple[str, ...] = ("stdlib",)
    """Prepared token files, or sets under ``dir``; stdlib is prepared when missing, and random is made up."""
    weights: tuple[PositiveFloat, ...] = ()
    """Share of each file in the mixture; empty takes them by size."""
    dir: str = "data"
    """Folder that holds prepared sets."""
    batch_size: PositiveInt
    """Sequences of one optimizer step, over the whole run."""
    sequence_length: PositiveInt
    """Tokens of one sequence."""
    eval_rows: NonNegativeInt = 256
    """Rows of the held-out split that an evaluation reads at most; 0 reads all of it."""


class OptimConfig(Part):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "adam"] = "adamw"
    """AdamW decays weights apart from the gradient; Adam adds the decay to it."""
    lr: PositiveFloat
    """Peak learning rate."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up; the first step has lr/warmup_steps."""
    decay: Literal["linear", "cosine", "1-sqrt", "none"] = "cosine"
    """Shape of the decay from the peak to the floor."""
    decay_steps: NonNegativeInt | None = None
    """Steps of the decay, at the end of the run; None decays from the end of warm-up, fewer leave a stable phase."""
    floor: Fraction = 0.1
    """Learning rate of the last step, as a share of the peak."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.95)
    """Decay rates of Adam's two moments."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    weight_decay: NonNegativeFloat = 0.1
    """Decay of the matrices; norms and biases (fewer than two dimensions) have none."""
    decay_embeddings: bool = True
    """Whether embedding and head decay like other matrices."""
    max_norm: NonNegativeFloat = 1.0
    """Largest gradient norm over all parameters; 0 clips nothing."""
    implementation: Literal["fused", "foreach", "loop"] = "fused"
    """Which of torch's implementations updates the parameters."""


class TrainConfig(Part):
    """The training run itself."""

    steps: PositiveInt
    """Optimizer steps."""
    seed: Seed = 0
    """Seed of initial weights and sample order."""
    init_from: str = ""
    """Folder of a run, or its weights folder, whose final weights are the initial ones; empty draws them by seed."""
    microbatches: PositiveInt = 1
    """Parts each data rank cuts its share of the batch into; their gradients add up."""
    zero: Literal[1, 2, 3, "auto"] = "auto"
    """What is sharded beside the optimizer state: 1 nothing more, 2 gradients, 3 gradients and parameters; auto is 1
    with pp or pipeline.chunks above 1, where a parameter serves many microbatches in a row, and 3 without."""
    recompute: str = "none"
    """Activations computed again in backward: none, full, every-N (each N-th block), ops (all but a declared list)."""
    dtype: Dtype | Literal["auto"] = "auto"
    """Compute dtype; auto is bfloat16 on CUDA and float32 on CPU."""
    master_dtype: Dtype | Literal["auto"] = "auto"
    """Dtype of stored parameters and optimizer state; auto is float32, or float64 when computing in it."""
    reduce_dtype: Dtype | Literal["auto"] = "auto"
    """Dtype gradients are summed in; auto is the stored parameters' dtype."""
    small_buffer: NonNegativeInt = 65536
    """Parameter sets of fewer elements share one buffer per stage, gathered and reduced once a step; 0 shares none."""
    compile: Literal["none", "eager", "aot_eager", "inductor"] = "none"
    """Back end of torch.compile for the model's parts; none runs them as they are."""
    deterministic: bool = False
    """Whether torch's deterministic algorithms are required."""
    gc_every: NonNegativeInt = 50
    """Steps between runs of Python's garbage collector, on all ranks at once; 0 leaves it automatic."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations on the held-out split; 0 evaluates before the first and after the last step only."""
    evaluate: bool = True
    """Whether the held-out split is evaluated at all."""
    save_final: bool = True
    """Whether the final weights are written to the run folder as safetensors."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto takes CUDA when there is a GPU."""


class PipelineConfig(Part):
    """What each pipeline stage holds, and how the stages take turns."""

    schedule: str | None = None
    """A name that ``fivefold schedule --help`` lists, or path/file.py:function that returns a table; none is 1f1b, or
    interleaved_split with several chunks."""
    chunks: PositiveInt | None = None
    """Stages of each rank; none is the schedule's own number."""
    stages: tuple[PositiveInt, ...] = ()
    """Number of the model's parts in each stage, first to last; empty makes the most expensive stage as cheap as can
    be."""
    costs: str = ""
    """Times of the actions that schedule auto plans with, such as F=1,I=1,W=1,comm=0.1; empty measures them in the
    first three steps."""
    memory_limit: PositiveFloat | None = None
    """Activations, each of one microbatch in one stage, that a rank may hold under schedule auto; none is what 1f1b
    holds."""


class ContextConfig(Part):
    """How a sequence is cut over ``cp``, and how attention reaches the other ranks' keys."""

    method: str = "auto"
    """ring, all_gather, ulysses, latent (for MLA), or path/file.py:function; auto takes the one of least estimated
    time."""
    placement: str = "zigzag"
    """Who holds which tokens: zigzag, contiguous, balanced (by work, for rows of many documents), or
    path/file.py:function."""
    link_gb_per_s: PositiveFloat = 50.0
    """What a rank sends to another in a second, in gigabytes; method auto weighs with it."""
    tflops: PositiveFloat = 400.0
    """Operations a rank does in a second, in millions of millions; method auto weighs with it."""


class CommConfig(Part):
    """Time limits of everything that crosses ranks."""

    init_timeout_s: PositiveFloat = 300.0
    """Limit of a collective until the first step is done, in seconds."""
    step_timeout_s: PositiveFloat = 100.0
    """Limit of a collective after the first step, on all groups, in seconds."""
    shutdown_timeout_s: PositiveFloat = 30.0
    """Limit of the teardown; a process that is still there is ended, in seconds."""


class MetricsConfig(Part):
    """What the run reports."""

    every: PositiveInt = 10
    """Steps between reports; the first and last step always report."""
    tensorboard: bool = True
    """Whether scalars are written for TensorBoard in the run folder."""
    wandb: str = ""
    """Weights & Biases project; empty does not use it."""
    norms: bool = False
    """Whether the gradient and weight norm of every parameter are reported."""
    timeline: bool = False
    """Whether a trace of the schedule's actions is written of every step that reports."""


class ProfileConfig(Part):
    """Traces of torch.profiler, and CUDA memory snapshots."""

    every: NonNegativeInt = 0
    """Steps between traces, each of one step; 0 traces nothing."""
    ranks: tuple[NonNegativeInt, ...] = (0,)
    """Ranks that trace."""
    memory: bool = False
    """Whether a CUDA memory snapshot is written beside each trace; one is always written when memory runs out."""
