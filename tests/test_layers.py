"""The walls of the house: which module may import which, and what importing the package must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "routing_lab"

# A module imports only lower ranks, or its own folder. The order is the design: data flows from facts to schedules to
# a runtime to outcomes to a verdict to a study to a certificate, and never back.
RANKS = {
    "errors": 0,
    "files": 0,
    "interrupts": 0,
    "visible": 0,
    "yamlfile": 1,
    "model": 1,
    "demo": 1,
    "synth": 1,
    "schedule": 2,
    "placement": 2.5,  # its files name the model they are for, as schedules do
    "placement.published": 2.5,
    "placement.plan": 3,
    "placement.sweep": 9,  # the same lever, measured
    "overrides": 3,
    "space": 3,
    "runtime": 4,
    "answers": 5,
    "measure": 5,
    "probes": 6,
    "gate": 7,
    "certificate": 8,
    "search": 9,
    "evaluate": 9,
    "validate": 9,
    "export": 10,
    "report": 10,
    "cli": 11,
}
# Programs that live beside the data they make; nothing in the package imports them.
PROGRAMS = {"routing_lab.demo.make_probes", "routing_lab.demo.train"}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.parent != PACKAGE)


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """The first two names below the package where they have a rank of their own, else the first."""
    names = module.split(".")[1:]
    within = ".".join(names[:2])
    return within if within in RANKS else names[0]


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {
                f"{node.module}.{alias.name}" if node.module == "routing_lab" else node.module for alias in node.names
            }
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.startswith("routing_lab.")}


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_a_module_imports_only_lower_ranks(path: Path) -> None:
    module = dotted(path)
    if module in PROGRAMS or module == "routing_lab.__main__":
        return
    own = room(module)
    assert own in RANKS, f"{module} has no rank: say where it stands"
    for name in imported(path):
        assert name not in PROGRAMS, f"{module} imports the program {name}"
        if name != "routing_lab.__version__" and room(name) != own:
            assert RANKS[room(name)] < RANKS[own], (
                f"{module} (rank {RANKS[own]}) imports {name} (rank {RANKS[room(name)]})"
            )


def test_only_search_imports_optuna() -> None:
    for path in modules():
        if room(dotted(path)) != "search":
            assert "import optuna" not in path.read_text(encoding="utf-8"), path
            assert "from optuna" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("target", ["routing_lab", "routing_lab.cli"])
def test_importing_loads_nothing_heavy(target: str) -> None:
    heavy = ["optuna", "llama_cpp", "datasets", "sympy", "scipy", "pandas", "matplotlib", "torch", "pyarrow"]
    code = f"import sys, {target}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
