"""The command line of the training, where PyTorch is not installed: it parses first and then says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from routing_lab.demo.train import main; main(sys.argv[1:])"


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--help"], 0, "Needs the extra"),
        (["run", "--help"], 0, "--embedding-length"),
        (["run"], 2, "directory"),
        (["run", "out"], 4, "PyTorch is not installed: pip install"),
        (["export", "a.pt", "b.gguf"], 4, "PyTorch is not installed: pip install"),
    ],
    ids=str,
)
def test_the_command_line_works_up_to_what_needs_torch(tmp_path: Path, argv: list[str], code: int, said: str) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, *argv]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
