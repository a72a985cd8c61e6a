"""What may be imported where, what an import costs, and that the core needs no Ray."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

_PACKAGE = Path(__file__).parents[2] / "ray_ulysses"
_FILES = tuple(sorted(_PACKAGE.rglob("*.py")))
# The parts of the package that exist to start Ray; everything else is the core.
_RAY_PARTS = ("ray_ulysses.cluster", "ray_ulysses.cli", "ray_ulysses.__main__")
# One foreign dependency, one home.
_HOMES = {
    "ray": ("cluster/",),
    "mlflow": ("tracking/mlflow_",),
    "deepspeed": ("engine/",),
    "obstore": ("storage/",),
}
_TENSOR_ROOMS = ("attention", "checkpoint", "engine", "parallel", "trainer")
"""The rooms whose code holds tensors of the process that trains."""
_STARTS_THREADS = re.compile(r"threading\.Thread\(|ThreadPoolExecutor\(|BackgroundCalls\(")
_WITHOUT_TENSORS = {"checkpoint/choice.py", "trainer/record.py"}


def _module(file: Path) -> str:
    parts = file.relative_to(_PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


_CORE = tuple(name for name in map(_module, _FILES) if not f"{name}.".startswith(tuple(f"{p}." for p in _RAY_PARTS)))


@cache
def _foreign_imports(file: Path) -> frozenset[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return frozenset(found)


def _run(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=_PACKAGE.parent, check=False)


def test_a_tracker_of_mlflow_is_built_without_importing_it() -> None:
    code = (
        "import sys; from pathlib import Path; from ray_ulysses.tracking.mlflow_tracker import MlflowSink; "
        "MlflowSink(uri='sqlite:///x.db', experiment='e', run_name='r', run_dir=Path('/nonexistent'), location='s'); "
        "sys.exit(bool({'mlflow', 'ray', 'torch'} & set(sys.modules)))"
    )
    assert _run(code).returncode == 0


@pytest.mark.parametrize("library", _HOMES)
def test_a_foreign_dependency_is_imported_in_its_home_only(library: str) -> None:
    homes = _HOMES[library]
    strangers = [
        str(file.relative_to(_PACKAGE))
        for file in _FILES
        if library in _foreign_imports(file) and not str(file.relative_to(_PACKAGE)).startswith(homes)
    ]
    assert strangers == []


def test_the_core_imports_with_ray_absent() -> None:
    # None in sys.modules makes `import ray` raise ModuleNotFoundError, as where it isn't installed.
    done = _run(
        "import importlib, sys\n"
        "sys.modules['ray'] = None\n"
        f"for name in {_CORE!r}:\n"
        "    importlib.import_module(name)\n"
        "import ray_ulysses\n"
        "for name in ray_ulysses.__all__:\n"
        "    getattr(ray_ulysses, name)\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("ray_ulysses", ("numpy", "pydantic", "torch", "ray", "transformers", "mlflow", "deepspeed", "rich")),
        ("ray_ulysses.config", ("numpy", "torch", "ray", "transformers", "mlflow", "deepspeed", "rich")),
        # A process per node holds it beside the training processes.
        ("ray_ulysses.peer_memory.agent", ("torch", "ray", "transformers", "mlflow", "deepspeed", "rich")),
        # Processes of each node that only keep, watch or supervise.
        ("ray_ulysses.cluster.peer_memory_agents", ("numba", "torch", "transformers", "mlflow", "deepspeed")),
        ("ray_ulysses.cluster.node_watch", ("numba", "torch", "transformers", "mlflow", "deepspeed")),
        ("ray_ulysses.cluster.worker", ("numba", "torch", "transformers", "mlflow", "deepspeed")),
        ("ray_ulysses.cluster.controller", ("torch", "transformers", "mlflow", "deepspeed")),
        ("ray_ulysses.data.read.row_source", ("torch", "ray", "transformers", "mlflow", "deepspeed", "rich")),
        # The texts of `inspect`, and what it needs of a run.
        ("ray_ulysses.commands.inspect", ("torch", "ray", "transformers", "mlflow", "deepspeed", "rich")),
        ("ray_ulysses.inspect.checkpoint_listing", ("torch", "ray", "transformers", "mlflow", "deepspeed", "rich")),
    ],
)
def test_an_import_brings_nothing_heavy_along(module: str, heavy: tuple[str, ...]) -> None:
    done = _run(f"import {module}, sys; print([name for name in {heavy!r} if name in sys.modules])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


# CPU seconds of this process, so that a busy machine does not fail the test. About four times what a quiet
# machine takes; torch alone is above either.
@pytest.mark.parametrize(("module", "budget_s"), [("ray_ulysses", 0.1), ("ray_ulysses.config", 0.6)])
def test_import_time_stays_in_its_budget(module: str, budget_s: float) -> None:
    code = f"import time; start = time.process_time(); import {module}; print(time.process_time() - start)"
    taken_s = min(float(_run(code).stdout) for _ in range(3))
    assert taken_s < budget_s


def test_an_import_has_no_effect() -> None:
    done = _run(
        "import os, sys\n"
        "before = dict(os.environ)\n"
        "import ray_ulysses, ray_ulysses.config\n"
        "assert dict(os.environ) == before\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_thread_of_a_room_that_holds_tensors_chooses_its_device() -> None:
    files = [file for room in _TENSOR_ROOMS for file in sorted((_PACKAGE / room).rglob("*.py"))]
    made = {
        str(file.relative_to(_PACKAGE)): "choose_device" in text
        for file in files
        if _STARTS_THREADS.search(text := file.read_text(encoding="utf-8"))
    }
    assert {"checkpoint/background.py", "checkpoint/load.py"} <= made.keys()
    assert {file for file, chooses in made.items() if not chooses} == _WITHOUT_TENSORS
