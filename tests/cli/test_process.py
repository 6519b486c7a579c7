"""The command line as a process: signals at any moment, streams that are full or closed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commandline import DEMO_SCHEDULES, ROOT

from routing_lab.search import load_study

PYTHON = [sys.executable, "-m", "routing_lab"]

# Sends itself a signal when the module of that name is about to be imported, then runs the command line.
INTERRUPTED_AT = """
import os, runpy, signal, sys
name, number = sys.argv.pop(1), int(sys.argv.pop(1))
def hook(event, args):
    if event == "import" and args[0] == name and not done:
        done.append(name)
        os.kill(os.getpid(), number)
done = []
sys.addaudithook(hook)
runpy.run_module("routing_lab", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("routing_lab.cli", signal.SIGINT),
        ("argparse", signal.SIGTERM),
        ("routing_lab.cli.files", signal.SIGINT),
        ("routing_lab.cli.options", signal.SIGHUP),
        ("routing_lab.report", signal.SIGINT),
    ],
)
def test_a_signal_in_the_middle_of_any_import_ends_the_process_without_a_traceback(module: str, number: int) -> None:
    command = ["schedule", "show", str(DEMO_SCHEDULES[0])]
    # Whoever runs the tests may have started them with a signal ignored (nohup does).
    heard = f"import signal\nsignal.signal({int(number)}, signal.SIG_DFL)\n" + INTERRUPTED_AT
    done = subprocess.run(
        [sys.executable, "-c", heard, module, str(int(number)), *command],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_signal_that_was_ignored_at_the_start_stays_ignored() -> None:
    """What nohup does, and a script with the jobs that it puts into the background."""
    command = ["schedule", "check", str(DEMO_SCHEDULES[0])]
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + INTERRUPTED_AT
    done = subprocess.run(
        [sys.executable, "-c", code, "argparse", str(int(signal.SIGINT)), *command],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "ok" in done.stdout


@pytest.mark.model
def test_a_study_that_is_told_to_end_saves_its_state_and_leaves_neither_lock_nor_process(tmp_path: Path) -> None:
    storage = tmp_path / "s.db"
    named = ["--storage", str(storage), "--study", "t"]
    process = subprocess.Popen(
        [*PYTHON, "search", *named, "--trials", "500", "--tokens", "8", "--context", "512"],
        stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not _children(process.pid) or not _evaluated(storage):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    children = _children(process.pid)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert "routing-lab search --study t" in error
    assert _evaluated(storage)
    assert not list(tmp_path.glob("*.lock"))
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def _evaluated(storage: Path) -> int:
    from routing_lab.errors import RoutingLabError

    try:
        return len(load_study(storage, "t").evaluated)
    except RoutingLabError:
        return 0


# ---------------------------------------------------------------------------------------------------------------------
# Streams


def run(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line of a shell in which ``$LAB`` is the command line."""
    lab = f"{sys.executable} -m routing_lab"
    return subprocess.run(
        ["/bin/bash", "-c", command.replace("$LAB", lab)],
        capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | environment,
    )  # fmt: skip


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["--help", "--version", "model", "model --json", "schedule check {}"])
def test_a_full_stdout_is_one_message_and_a_documented_code(command: str, unbuffered: str) -> None:
    done = run(f"$LAB {command.format(DEMO_SCHEDULES[0])} >/dev/full", PYTHONUNBUFFERED=unbuffered)
    message = "routing-lab: error: standard output: cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (3, message)


@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-"])
def test_a_stderr_that_takes_nothing_leaves_the_exit_code_as_it_is(stderr: str) -> None:
    assert run(f"$LAB nonsense {stderr}").returncode == 2
    assert run(f"$LAB schedule check missing.yaml {stderr}").returncode == 3
    done = run(f"$LAB schedule check missing.yaml --json {stderr}")
    assert done.returncode == 3
    assert '"UserFileError"' in done.stdout


def test_a_closed_stdin_is_said_where_text_is_read_from_it() -> None:
    done = run("$LAB answers check --type integer --expected 1 <&-")
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "standard input: is closed" in done.stderr


def test_with_closed_streams_no_file_gets_the_number_of_one(tmp_path: Path) -> None:
    """A database under number 2 would be written over by whatever writes to stderr."""
    code = (
        "from routing_lab.cli import main; import os; main(['--version']);"
        "number = os.open(os.devnull, os.O_RDONLY); open('n.txt', 'w').write(str(number))"
    )
    command = ["/bin/bash", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    subprocess.run(command, check=False, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert int((tmp_path / "n.txt").read_text(encoding="ascii")) > 2
