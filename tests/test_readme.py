"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.model
def test_the_example_in_the_readme_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.strip().splitlines()) <= 12
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts, answer, speed = done.stdout.splitlines()
    assert "3: 4" in counts
    assert answer.endswith("Answer: 433")
    assert re.fullmatch(r"\d\.\d\d \[\d\.\d\d, \d\.\d\d\]", speed)


def test_every_path_in_the_tree_of_the_readme_exists() -> None:
    (tree,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    folder: list[str] = []
    for line in tree.splitlines():
        indent, name = re.fullmatch(r"( *)(\S+).*", line).groups()  # type: ignore[union-attr]
        folder[len(indent) // 2 :] = [name.rstrip("/")]
        assert ROOT.joinpath(*folder).exists(), "/".join(folder)
