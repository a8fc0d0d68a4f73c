"""Functions named by a string: ``module:function``, or ``path/file.py:function`` for a user's own."""

from __future__ import annotations

import hashlib
import importlib
import sys
import traceback
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import ConfigError, nearest


def function(name: str, key: str) -> Callable[..., Any]:
    """The function that ``name`` points to.

    Args:
        key: what the name is called in messages.

    Raises:
        ConfigError: if there is no such file, module or function, or if it fails on import.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise ConfigError([f"{key}={name} names no function. Use path/file.py:function or module:function."])
    module = _file(Path(where), key, name) if where.endswith(".py") else _module(where, key, name)
    found = getattr(module, attribute, None)
    if not callable(found):
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        close = nearest(attribute, own)
        hint = f"Did you mean {where}:{close}?" if close else f"Use one of {', '.join(own) or 'its functions'}."
        raise ConfigError([f"{key}={name} is not a function: {where} has no {attribute}. {hint}"])
    return found


def absolute(name: str) -> str:
    """``name`` with its file, if it names one, made independent of the working folder."""
    where, colon, attribute = name.rpartition(":")
    return f"{Path(where).resolve()}{colon}{attribute}" if where.endswith(".py") else name


def _module(where: str, key: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except (Exception, SystemExit) as error:
        raise ConfigError([_failed(key, name, where, error)]) from error


def _file(path: Path, key: str, name: str) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        near = nearest(path.name, (p.name for p in path.parent.glob("*.py"))) if path.parent.is_dir() else None
        hint = f"Did you mean {path.parent / near}?" if near else "Use the path of an existing Python file."
        raise ConfigError([f"{key}={name} names no file: {path} does not exist. {hint}"])
    module_name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[module_name] = module  # pydantic looks up a class's annotations here
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ConfigError([_failed(key, name, str(path), error)]) from error
    return module


def _failed(key: str, name: str, where: str, error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = error.lineno if isinstance(error, SyntaxError) else last.lineno
    file = error.filename if isinstance(error, SyntaxError) else last.filename
    said = " ".join(str(error).split())
    return f"{key}={name} cannot be imported: {type(error).__name__}: {said} ({file}, line {line}). Correct {where}."
