"""``routing-lab synth`` as a user meets it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest

from routing_lab.cli import main
from routing_lab.cli import synth as command
from routing_lab.synth import SHAPES, WeightType, model_name

TINY = ["synth", "--shape", "qwen35moe-35b-a3b", "--blocks", "5", "--width", "0.0625", "--experts", "16"]
TINY += ["--vocabulary", "512"]


def run_json(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, dict]:
    code = main([*map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_choices_of_the_help_are_all_there_are() -> None:
    assert tuple(SHAPES) == command.SHAPES
    assert get_args(WeightType) == command.TYPES


def test_it_writes_the_model_that_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "big.gguf"
    code, said = run_json(capsys, *TINY, "--type", "q8_0", "--seed", "3", "-o", path)
    assert code == 0
    assert said["file"] == str(path)
    assert (said["shape"]["blocks"], said["shape"]["experts"], said["shape"]["vocabulary"]) == (5, 16, 512)
    code, facts = run_json(capsys, "model", path)
    assert code == 0
    shape = SHAPES["qwen35moe-35b-a3b"].scaled(blocks=5, width=0.0625, experts=16, vocabulary=512)
    assert facts["name"] == model_name(shape, "q8_0", 3)
    assert facts["parameters"] == said["parameters"]
    assert said["weight_bytes"] <= facts["size_bytes"] < said["weight_bytes"] + 2**20


def test_the_size_is_said_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "-o", str(tmp_path / "big.gguf")]) == 0
    out = capsys.readouterr().out
    assert "MiB in q4_0" in out
    assert "5 stored, 0 dense, 1 for drafting (MTP)" in out
    (tmp_path / "big.gguf").unlink()
    assert main([*TINY, "--plan", "-o", str(tmp_path / "big.gguf")]) == 0
    assert "MiB in q4_0" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([*TINY], "-o FILE"),
        ([*TINY[:-1], "100", "-o", "{tmp}/x"], "at least 259 tokens"),
        (["synth", "--shape", "qwen35moe-35b-a3b", "--blocks", "1", "-o", "{tmp}/x"], "2 to 512 blocks, not 1"),
        (["synth", "--shape", "gpt-9", "-o", "{tmp}/x"], "qwen3moe-30b-a3b"),
        ([*TINY, "--type", "f64", "-o", "{tmp}/x"], "q8_0"),
        ([*TINY, "--width", "0", "-o", "{tmp}/x"], "above 0"),
    ],
)
def test_a_mistake_gets_one_message_and_writes_nothing(
    argv: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(tmp=tmp_path) for word in argv]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("output", ["{tmp}", "/proc/x/big.gguf"])
def test_a_place_that_cannot_be_written_is_a_bad_file(
    output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "-o", output.format(tmp=tmp_path)]) == 3
    assert output.format(tmp=tmp_path) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_found_out_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    total, used, _ = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(total, used, 1 << 30))
    full = ["synth", "--shape", "qwen35moe-35b-a3b", "-o", str(tmp_path / "big.gguf")]
    assert main(full) == 2
    error = capsys.readouterr().err
    assert "needs 18.7 GiB and its disk has 1.0 GiB free" in error
    assert "less width" in error
    assert list(tmp_path.iterdir()) == []
    assert main([*TINY, "-o", str(tmp_path / "small.gguf")]) == 0


def test_a_write_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    process = subprocess.Popen(
        [sys.executable, "-m", "routing_lab", "synth", "--shape", "qwen3moe-30b-a3b", "--blocks", "4", "-o", str(path)],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("big.gguf.*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.terminate()
    _, error = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in error) == (130, False)
    assert list(tmp_path.iterdir()) == []
