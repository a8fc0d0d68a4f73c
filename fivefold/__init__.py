"""Fivefold trains large language models on any mix of pipeline, data, tensor, context and expert parallelism."""

__version__ = "0.1.0"
