"""``RunConfig``: everything a run depends on, checked as a whole before any process exists."""

from __future__ import annotations

from typing import Literal

from pydantic import SerializeAsAny

from .base import Part
from .dims import ParallelDims
from .model import ModelConfig
from .parts import (
    CommConfig,
    ContextConfig,
    DataConfig,
    MetricsConfig,
    OptimConfig,
    PipelineConfig,
    ProfileConfig,
    TrainConfig,
)


class RunConfig(Part):
    """One training run. A recipe returns it; the command line overrides its fields by dotted name."""

    model: SerializeAsAny[ModelConfig]
    """The model's shape."""
    parallel: str = "single"
    """The layout, such as fsdp2-tp2; ``fsdp*`` takes the ranks left over."""
    data: DataConfig
    """What is read."""
    optim: OptimConfig
    """The optimizer and its schedule."""
    train: TrainConfig
    """The run itself."""
    pipeline: PipelineConfig = PipelineConfig()
    """Stages and their schedule."""
    context: ContextConfig = ContextConfig()
    """Long sequences over several ranks."""
    comm: CommConfig = CommConfig()
    """Time limits."""
    metrics: MetricsConfig = MetricsConfig()
    """Reports."""
    profile: ProfileConfig = ProfileConfig()
    """Traces."""

    @property
    def dims(self) -> ParallelDims:
        """The layout's sizes.

        Raises:
            ConfigError: if ``parallel`` is not a layout of known size.
        """
        return ParallelDims.parse(self.parallel)

    @property
    def zero(self) -> Literal[1, 2, 3]:
        """``train.zero`` with auto resolved: 1 with a pipeline, else 3.

        Raises:
            ConfigError: if ``parallel`` is not a layout of known size.
        """
        if self.train.zero != "auto":
            return self.train.zero
        return 1 if self.dims.pp > 1 or (self.pipeline.chunks or 1) > 1 else 3
