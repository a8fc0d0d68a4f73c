"""The training run: state, step, loop, optimizer, evaluation."""

from .main import run

__all__ = ["run"]
