"""Who may import whom. The table is the design's; each checker is shown to find a planted violation."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable

import pytest

from tests.architecture.source import PACKAGE, ROOT, Module, dotted, package_modules

# Folder -> the folders it may import besides itself.
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "ops": set(),
    "observe": set(),
    "recipes": {"config"},
    "schedule": {"config"},
    "mesh": {"config", "observe"},
    "data": {"config", "observe"},
    "layers": {"config", "observe", "mesh", "ops"},
    "models": {"config", "observe", "mesh", "ops", "layers"},
    "wrap": {"config", "schedule", "observe", "mesh", "ops"},  # never layers or models: any model can be wrapped
    "checkpoint": {"config", "mesh"},
}
ALLOWED["train"] = set(ALLOWED)
ALLOWED["tools"] = set(ALLOWED)
ALLOWED["cli"] = set(ALLOWED)

# Importing torch takes seconds; what a wrong option or `--help` needs must not wait for it.
NO_TORCH = {"config", "recipes", "schedule", "data"}
# The command's first module, and what runs before it: `cli` imports the rest once the configuration is valid.
START = {"__init__.py", "cli/__init__.py", "cli/main.py"}
# Only the mesh talks to other ranks; `cli` launches them, `tools` and `train` may need their errors.
NO_DISTRIBUTED = {"config", "recipes", "schedule", "ops", "observe", "data", "layers", "models", "wrap"}
# Where imports inside functions are allowed: the command line, to be fast; a library that may be missing; and what a
# configuration names as text, ``module:function``.
LATE_IMPORTS = ("cli/", "config/optional.py", "config/locate.py")
BY_NAME = {"import_module", "__import__"}
# What to import of packages that have another name than their own, or more than one.
IMPORTED_AS = {"nvidia-ml-py": {"pynvml"}, "pydantic": {"pydantic", "pydantic_core", "annotated_types"}}


def folder_violations(module: Module) -> list[str]:
    """Imports of our own folders that the table does not allow."""
    found = []
    if module.folder not in ALLOWED and module.path not in {"__init__.py", "__main__.py"}:
        found.append(f"{module.at(1)} is in no folder of the table")
    for item in module.imports():
        parts = item.module.split(".")
        if parts[0] != PACKAGE or not module.folder:
            continue
        targets = [parts[1]] if len(parts) > 1 else [name for name in item.names if name != "__version__"]
        found += [
            f"{module.at(item.line)} imports {PACKAGE}.{target}, which {module.folder} may not"
            for target in targets or ([] if item.names else ["*"])
            if target != module.folder and target not in ALLOWED.get(module.folder, set())
        ]
    return found


def torch_violations(module: Module) -> list[str]:
    """Imports of torch where it is not allowed, and of its communication."""
    found = []
    for item in module.imports():
        if item.module.split(".")[0] != "torch":
            continue
        distributed = item.module.startswith("torch.distributed") or "distributed" in item.names
        if module.folder in NO_TORCH or module.path in START:
            found.append(f"{module.at(item.line)} imports torch")
        if distributed and module.folder in NO_DISTRIBUTED:
            found.append(f"{module.at(item.line)} imports torch.distributed: go through fivefold.mesh")
    if module.folder in NO_DISTRIBUTED:
        found += [
            f"{module.at(node.lineno)} uses torch.distributed: go through fivefold.mesh"
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Attribute) and dotted(node) == "torch.distributed"
        ]
    return found


def late_violations(module: Module) -> list[str]:
    """Imports inside functions, by statement or by name."""
    if module.path.startswith(LATE_IMPORTS) or module.path == "__init__.py":
        return []
    late = {item.line for item in module.imports() if item.late}
    for node, inside in module.nodes():
        if inside and isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in BY_NAME:
            late.add(node.lineno)
    return [f"{module.at(line)} imports inside a function" for line in sorted(late)]


def foreign_violations(module: Module, declared: Iterable[str]) -> list[str]:
    """Imports of packages that ``pyproject.toml`` does not require."""
    known = {*sys.stdlib_module_names, PACKAGE, *declared}
    return [
        f"{module.at(item.line)} imports {item.module}, which pyproject.toml does not require"
        for item in module.imports()
        if item.module.split(".")[0] not in known
    ]


def required_packages() -> dict[str, set[str]]:
    """The import names of each required package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[\[<>=!~; ]", line)[0] for line in project["dependencies"]]
    return {name: IMPORTED_AS.get(name, {name.replace("-", "_")}) for name in names}


MODULES = package_modules()


def test_the_table_has_no_cycle():
    order: list[str] = []
    while len(order) < len(ALLOWED):
        ready = [folder for folder in ALLOWED if folder not in order and ALLOWED[folder] - {folder} <= set(order)]
        assert ready, f"cycle among {set(ALLOWED) - set(order)}"
        order += ready


def test_folders():
    assert [line for module in MODULES for line in folder_violations(module)] == []


def test_torch():
    assert [line for module in MODULES for line in torch_violations(module)] == []


def test_late_imports():
    assert [line for module in MODULES for line in late_violations(module)] == []


def test_requirements():
    known = set().union(*required_packages().values())
    assert [line for module in MODULES for line in foreign_violations(module, known)] == []


def test_requirements_are_used():
    # By text: TensorBoard is reached through torch.utils, and a library may be imported late, by its name.
    text = "".join(module.text for module in MODULES)
    assert [name for name, imports in required_packages().items() if not any(i in text for i in imports)] == []


def test_every_folder_is_a_package():
    folders = {path.parent for path in (ROOT / PACKAGE).rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_nothing_that_must_start_fast_loads_torch():
    names = [module.name for module in MODULES if module.folder in NO_TORCH or module.path in START]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n    "
    code += "assert 'torch' not in sys.modules, name + ' loads torch'\n"
    done = subprocess.run(
        [sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("ops/rope.py", "from ..mesh.axis import Axis"),
        ("ops/rope.py", "from .. import mesh"),
        ("ops/rope.py", "import fivefold.config.dims"),
        ("observe/metrics.py", "from fivefold.config import RunConfig"),
        ("wrap/data.py", "from ..layers.norm import RMSNorm"),
        ("wrap/deep/data.py", "from ...models import decoder"),
        ("wrap/data.py", "def f():\n    from fivefold import models"),
        ("data/sampler.py", "from ..mesh import Mesh"),
        ("train/loop.py", "from ..tools.verify import verify"),
        ("config/run.py", "if TYPE_CHECKING:\n    from ..mesh import Mesh"),
        ("layers/norm.py", "import fivefold"),
        ("misc/extra.py", ""),
        ("extra.py", ""),
    ],
)
def test_folders_can_fail(path, text):
    assert folder_violations(Module(path, text))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("wrap/data.py", "from ..mesh.axis import Axis\nfrom . import recompute\nimport fivefold.ops.linear"),
        ("tools/verify.py", "from ..train import loop\nfrom .. import __version__"),
        ("__init__.py", "from .config import RunConfig"),
    ],
)
def test_folders_can_pass(path, text):
    assert folder_violations(Module(path, text)) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("config/run.py", "import torch"),
        ("schedule/table.py", "def f():\n    from torch.nn import Module"),
        ("recipes/tiny.py", "import torch.nn.functional as F"),
        ("data/sampler.py", "import torch"),
        ("cli/main.py", "import torch"),
        ("layers/norm.py", "import torch.distributed as dist"),
        ("ops/linear.py", "from torch import distributed"),
        ("wrap/data.py", "import torch\ntorch.distributed.all_reduce(x)"),
    ],
)
def test_torch_can_fail(path, text):
    assert torch_violations(Module(path, text))


def test_torch_can_pass():
    assert torch_violations(Module("cli/launch.py", "import torch")) == []
    assert torch_violations(Module("mesh/transport.py", "import torch.distributed as dist")) == []


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    import json",
        "class A:\n    def f(self):\n        if x:\n            from json import dumps",
        "def f():\n    importlib.import_module('json')",
        "f = lambda: __import__('json')",
    ],
)
def test_late_imports_can_fail(text):
    assert late_violations(Module("train/loop.py", text))
    assert late_violations(Module("cli/main.py", text)) == []


def test_requirements_can_fail():
    assert foreign_violations(Module("ops/a.py", "import scipy.special"), ["numpy"])
    assert foreign_violations(Module("ops/a.py", "import numpy.linalg, os"), ["numpy"]) == []
