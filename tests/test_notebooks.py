"""The notebooks run head to tail, show nothing of the machine, and leave the thinking to the package."""

from __future__ import annotations

import ast
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

from routing_lab import demo
from routing_lab.probes import ProbeSet

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
# Enough to accept a schedule on a busy machine, and no more.
SMALL = {"TRIALS": "7", "TOKENS": "32", "ROUNDS": "18"}


@pytest.fixture
def small_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebook's settings for a run of seconds: few trials, and few of the demo model's probes."""
    probes = ProbeSet.load(demo.probes_path())
    # All of the gate: what passes ten probes is fast and wrong, and nothing would be accepted.
    few = (*probes.split("gate"), *probes.split("holdout")[::12])
    (tmp_path / "probes.yaml").write_text(replace(probes, items=few).to_yaml(), encoding="utf-8")
    monkeypatch.setenv("ROUTING_LAB_NOTEBOOK_PROBES", str(tmp_path / "probes.yaml"))
    for name, value in SMALL.items():
        monkeypatch.setenv(f"ROUTING_LAB_NOTEBOOK_{name}", value)


@pytest.fixture(scope="module")
def execute() -> ModuleType:
    """The script that a developer runs to renew the outputs."""
    spec = importlib.util.spec_from_file_location("execute", NOTEBOOKS[0].parent / "execute.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_of(path: Path) -> list[str]:
    cells = nbformat.read(path, as_version=4).cells
    # Lines that start with % are for IPython.
    return [
        "\n".join(line for line in cell.source.splitlines() if line[:1] != "%")
        for cell in cells
        if cell.cell_type == "code"
    ]


def images_of(notebook: nbformat.NotebookNode) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_has_no_logic_of_its_own(path: Path) -> None:
    logic = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.If, ast.For, ast.While, ast.Try)
    for source in code_of(path):
        found = [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, logic)]
        assert not found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_committed_with_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert images_of(notebook) == 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_committed_outputs_show_no_error_no_warning_and_no_machine(path: Path, execute: ModuleType) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert execute.machine_paths(notebook) == []
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]


@pytest.mark.model
@pytest.mark.usefixtures("small_settings")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_head_to_tail(path: Path, execute: ModuleType) -> None:
    notebook = execute.executed(path, timeout_s=500)
    assert images_of(notebook) == 4
    assert execute.machine_paths(notebook) == []


def test_a_machine_path_in_an_output_is_found(execute: ModuleType) -> None:
    shown = nbformat.v4.new_output("stream", text=f"{sys.prefix}/lib/python/warning.py:1: beware")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", outputs=[shown])])
    assert sys.prefix in execute.machine_paths(notebook)
