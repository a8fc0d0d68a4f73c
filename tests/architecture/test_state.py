"""No hidden state: nothing mutable in modules, no environment switches, no patching, no pickle."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.source import Module, dotted, package_modules

# Folder and name of what must be mutable at module level, and why. Nothing else may be.
EXCEPTIONS = {
    ("mesh", "_AXES"): "a torch operator takes only numbers and text, so an axis travels by its key",
    ("mesh", "_NUMBERS"): "what makes those keys unique",
}
# Pickles between a process and the workers that it forked: never on disk.
PICKLING_PIPES = {"mesh/pool_worker.py"}
ENVIRONMENT_FOLDERS = {"cli", "mesh"}
CONTAINERS = {
    *(
        "list",
        "dict",
        "set",
        "bytearray",
        "defaultdict",
        "deque",
        "Counter",
        "OrderedDict",
        "ChainMap",
        "count",
        "cycle",
    ),
    *("WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "local", "ContextVar", "Queue", "SimpleQueue"),
}
MUTATORS = {
    *("append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear"),
    *("appendleft", "popleft", "sort", "reverse"),
}
PICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
PICKLING_CALLS = {"torch.load", "torch.save", "pickle.load", "pickle.dump"}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}


def module_statements(module: Module) -> Iterator[ast.stmt]:
    """Statements that run at import: also those under ``if``, ``try`` and ``with``."""
    stack: list[ast.stmt] = list(module.tree.body)
    while stack:
        statement = stack.pop()
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            stack += [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.stmt)]
            handlers = getattr(statement, "handlers", [])
            stack += [node for handler in handlers for node in handler.body]


def mutable(value: ast.AST | None) -> str | None:
    """``empty`` or ``filled`` when the expression makes a container that can change, else None."""
    if isinstance(value, ast.List | ast.Set):
        return "filled" if value.elts else "empty"
    if isinstance(value, ast.Dict):
        return "filled" if value.keys else "empty"
    if isinstance(value, ast.ListComp | ast.SetComp | ast.DictComp):
        return "filled"
    if isinstance(value, ast.Call) and dotted(value.func).split(".")[-1] in CONTAINERS:
        plain = isinstance(value.func, ast.Name) and value.func.id in {"list", "dict", "set"}
        return "filled" if plain and (value.args or value.keywords) else "empty"
    return None


def containers(module: Module) -> Iterator[tuple[str, str, int]]:
    """Name, kind and line of each container that a module-level statement assigns."""
    for statement in module_statements(module):
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            kind = mutable(statement.value)
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if kind and isinstance(target, ast.Name):
                    yield target.id, kind, statement.lineno


def state_violations(module: Module) -> list[str]:
    """Containers at module level that are empty, not named as constants, or changed by a function; ``global``."""
    found, constants = [], set()
    for name, kind, line in containers(module):
        if (module.folder, name) in EXCEPTIONS or name == "__all__":
            continue
        constants.add(name)
        if kind == "empty":
            found.append(f"{module.at(line)} {name} is a container to be filled later")
        elif name.lstrip("_") != name.lstrip("_").upper():
            found.append(f"{module.at(line)} {name} is mutable: name it as a constant, or use a tuple")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Global):
            found.append(f"{module.at(node.lineno)} global {', '.join(node.names)}")
        changed = _changed(node)
        if changed in constants:
            found.append(f"{module.at(node.lineno)} changes the module's {changed}")
    return found


def _changed(node: ast.AST) -> str:
    """The name whose container this node changes, else the empty string."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return dotted(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return dotted(node.func.value)
    return ""


def environment_violations(module: Module) -> list[str]:
    """Uses of environment variables outside the folders that face the outside."""
    if module.folder in ENVIRONMENT_FOLDERS:
        return []
    lines = {
        node.lineno for node in ast.walk(module.tree) if isinstance(node, ast.Attribute) and dotted(node) in ENVIRONMENT
    }
    lines |= {i.line for i in module.imports() if i.module == "os" and {f"os.{name}" for name in i.names} & ENVIRONMENT}
    return [f"{module.at(line)} uses the environment" for line in sorted(lines)]


def pickle_violations(module: Module) -> list[str]:
    """Anything that writes or reads a pickle on disk."""
    found = []
    for item in module.imports():
        root = item.module.split(".")[0]
        of_torch = item.module == "torch" and {"load", "save"} & set(item.names)
        if of_torch or (root in PICKLERS and module.path not in PICKLING_PIPES):
            found.append(f"{module.at(item.line)} imports {item.module}, to pickle")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            unsafe = any(key.arg == "allow_pickle" and not _is_false(key.value) for key in node.keywords)
            if dotted(node.func) in PICKLING_CALLS or unsafe:
                found.append(f"{module.at(node.lineno)} pickles")
    return found


def _is_false(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def patch_violations(module: Module) -> list[str]:
    """Attributes set on an imported module or class, and replaced ``forward`` methods."""
    imported = set()
    for node, _ in module.nodes():
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if dotted(node.value) in imported or node.attr == "forward":
                found.append(f"{module.at(node.lineno)} patches {dotted(node) or node.attr}")
        elif isinstance(node, ast.Call) and dotted(node.func) == "setattr" and dotted(node.args[0]) in imported:
            found.append(f"{module.at(node.lineno)} patches {dotted(node.args[0])}")
    return found


CHECKS = [state_violations, environment_violations, pickle_violations, patch_violations]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_package(check):
    assert [line for module in package_modules() for line in check(module)] == []


def test_exceptions_are_needed():
    present = {(module.folder, name) for module in package_modules() for name, _, _ in containers(module)}
    assert set(EXCEPTIONS) <= present


PLANTED = [
    (state_violations, "cache = {}"),
    (state_violations, "CACHE: dict[str, int] = {}"),
    (state_violations, "if True:\n    seen = set()"),
    (state_violations, "try:\n    pass\nexcept ImportError:\n    Q = collections.deque(maxlen=3)"),
    (state_violations, "names = ['a', 'b']"),
    (state_violations, "GROUPS = weakref.WeakValueDictionary()"),
    (state_violations, "def f():\n    global x\n    x = 1"),
    (state_violations, "TABLE = {'a': 1}\ndef f():\n    TABLE['b'] = 2"),
    (state_violations, "TABLE = ['a']\ndef f():\n    TABLE.append('b')"),
    (environment_violations, "import os\nos.environ['A'] = '1'"),
    (environment_violations, "import os\nx = os.getenv('A')"),
    (environment_violations, "from os import environ"),
    (pickle_violations, "import pickle"),
    (pickle_violations, "def f():\n    from pickle import loads"),
    (pickle_violations, "torch.load(path, weights_only=True)"),
    (pickle_violations, "np.load(path, allow_pickle=True)"),
    (patch_violations, "import torch\ntorch.add = None"),
    (patch_violations, "from torch import nn\nnn.Linear = None"),
    (patch_violations, "from torch.nn import Linear\nsetattr(Linear, 'forward', f)"),
    (patch_violations, "def f(module):\n    module.forward = g"),
]
CLEAN = """
import os
import torch
__all__ = ["f"]
AXES = ("pp", "tp")
TABLE = {"a": 1}
class A:
    SHARDING = {"w": ("tp", None)}
    def forward(self, x):
        seen = {}
        seen["a"] = os.path.join("a", TABLE["a"])
        self.forward_calls = 0
        return seen
"""


@pytest.mark.parametrize(("check", "text"), PLANTED)
def test_package_can_fail(check, text):
    assert check(Module("train/loop.py", text))


def test_pipes_may_not_write_files():
    path = min(PICKLING_PIPES)
    assert pickle_violations(Module(path, "import pickle\npickle.dump(x, file)"))
    assert pickle_violations(Module(path, "import pickle\npickle.loads(message)")) == []


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_package_can_pass(check):
    assert check(Module("train/loop.py", CLEAN)) == []
