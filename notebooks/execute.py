"""Run the notebooks head to tail and write their outputs back: ``python notebooks/execute.py [NOTEBOOK...]``.

Nothing of the machine may be committed with an output: a path below this repository, the home folder or the temporary
folder is an error, and times are not recorded.
"""

# ruff: noqa: INP001, T201 - a program beside the notebooks, no module of a package

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent


def executed(path: Path, *, timeout_s: int = 1800) -> nbformat.NotebookNode:
    """The notebook with fresh outputs; it runs in its own folder, as a reader's would. Raises on the first bad cell."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=timeout_s,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    # The kernel writes the version of the Python it ran on; the outputs do not depend on it.
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
    )
    return notebook


def machine_paths(notebook: nbformat.NotebookNode) -> list[str]:
    """The folders of this machine that an output shows; empty for a notebook fit to be committed."""
    outputs = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    private = {str(HERE.parent), str(Path.home()), tempfile.gettempdir(), sys.prefix}
    return sorted(folder for folder in private if len(folder) > 1 and folder in outputs)


def main(paths: list[str]) -> int:
    """Execute and write back; returns the exit code."""
    for path in [Path(given).resolve() for given in paths] or sorted(HERE.glob("*.ipynb")):
        notebook = executed(path)
        if leaks := machine_paths(notebook):
            print(f"{path.name}: an output shows {', '.join(leaks)}; nothing was written", file=sys.stderr)
            return 1
        nbformat.write(notebook, path)
        print(f"{path.name}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells executed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
