"""Shapes declared with jaxtyping are enforced while tests run, and cost nothing otherwise."""

from __future__ import annotations

import subprocess
import sys

import jaxtyping
import pytest
import torch

from fivefold.ops.norm import rms_norm
from tests.architecture.source import ROOT


def test_a_wrong_shape_raises():
    with pytest.raises(jaxtyping.TypeCheckError):
        rms_norm(torch.ones(2, 4), torch.ones(1), 1e-6)


def test_a_wrong_dtype_raises():
    with pytest.raises(jaxtyping.TypeCheckError):
        rms_norm(torch.ones(2, 4, dtype=torch.int64), torch.ones(4), 1e-6)


def test_users_do_not_pay_for_it():
    code = "import sys, fivefold.ops.norm as norm; assert 'beartype' not in sys.modules; "
    code += "assert not hasattr(norm.rms_norm, '__wrapped__')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
