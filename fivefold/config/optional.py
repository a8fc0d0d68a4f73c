"""The one way to import a library that not every installation has."""

from __future__ import annotations

import importlib
from types import ModuleType

from .errors import ConfigError


def optional(name: str, extra: str) -> ModuleType:
    """Import module ``name``, which the optional extra ``extra`` installs.

    Raises:
        ConfigError: naming the extra, if the library is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != name.partition(".")[0]:
            raise  # the library is there; something it needs is not
        library = name.partition(".")[0]
        raise ConfigError([f"{library} is not installed. Run `pip install 'fivefold[{extra}]'`."]) from None
