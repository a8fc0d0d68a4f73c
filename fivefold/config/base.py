"""What every part of a configuration is: frozen, keyword-only, validated, documented by its attribute docstrings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """One group of fields. Fields are documented by the docstring under each, which the help text shows."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )
