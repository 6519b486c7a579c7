"""Runs the command line in this process, as the tests of every command do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from routing_lab.cli import main

ROOT = Path(__file__).parent.parent.parent
DEMO_SCHEDULES = sorted((ROOT / "schedules" / "demo").glob("*.yaml"))
FIGURE_1 = sorted((ROOT / "schedules" / "figure-1").glob("*.yaml"))
QUICK = ["--tokens", "8", "--rounds", "6", "--context", "512"]


def run_json(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, object]:
    code = main([str(word) for word in argv] + ["--json"])
    return code, json.loads(capsys.readouterr().out)


def exit_code(argv: Sequence[str | Path]) -> int:
    return main([str(word) for word in argv])


def fails(capsys: pytest.CaptureFixture[str], code: int, *argv: str | Path) -> str:
    """Run a command that must fail with ``code`` and one message; return the message."""
    assert exit_code(argv) == code
    error = capsys.readouterr().err
    assert error.count("error: ") == 1
    assert "Traceback" not in error
    return error
