"""The symbolic worker: killed, starved, asked from threads and across a fork, it answers or is replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from routing_lab.answers import Judge, Reason, Status
from routing_lab.answers import supervisor as supervisor_module
from routing_lab.answers.syntax import parse
from routing_lab.answers.worker import write_tree
from routing_lab.errors import RuntimeFailureError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def judge():
    with Judge() as own:
        yield own


def verdict(judge, answer=r"x^2+2x+1", expected="(x+1)^2"):
    judgement = judge.judge(rf"\boxed{{{answer}}}", expected=expected, answer_type="expression")
    return judgement.reason or judgement.status


def processes_of(pid):
    """The process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    below = children.read_text().split() if children.exists() else []
    return [pid, *(found for child in below for found in processes_of(int(child)))]


def gone(pids):
    return all(
        not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        for pid in pids
    )


def wait_until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_importing_and_judging_numbers_loads_no_sympy_and_starts_no_process():
    code = (
        "import sys; from routing_lab.answers import Judge\n"
        "judge = Judge(); judge.judge('Answer: 5', expected='5', answer_type='integer')\n"
        "assert 'sympy' not in sys.modules and judge._supervisor._process is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_an_endless_comparison_is_undecidable_and_the_next_one_is_answered_at_once(judge):
    assert verdict(judge) is Status.CORRECT
    assert verdict(judge, r"\sqrt{10^{20}}!") is Reason.UNDECIDABLE
    started = time.perf_counter()
    assert verdict(judge) is Status.CORRECT
    assert time.perf_counter() - started < 0.5, "a replacement is forked, not started"


def test_memory_is_bounded(judge):
    assert verdict(judge) is Status.CORRECT
    assert verdict(judge, r"2^{\sqrt{10^{30}}}") is Reason.UNDECIDABLE
    assert verdict(judge) is Status.CORRECT


def test_a_worker_that_is_killed_from_outside_is_replaced(judge):
    assert verdict(judge) is Status.CORRECT
    for pid in reversed(processes_of(judge._supervisor._process.pid)):
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: judge._supervisor._process.poll() is not None)
    assert verdict(judge) is Status.CORRECT


def test_a_child_that_is_killed_while_idle_costs_at_most_one_undecidable(judge):
    assert verdict(judge) is Status.CORRECT
    child = processes_of(judge._supervisor._process.pid)[-1]
    os.kill(child, signal.SIGKILL)
    assert wait_until(lambda: gone([child]))
    assert verdict(judge) in {Status.CORRECT, Reason.UNDECIDABLE}
    assert verdict(judge) is Status.CORRECT


def test_it_works_from_many_threads_at_once(judge):
    found = []
    threads = [threading.Thread(target=lambda: found.append(verdict(judge))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [Status.CORRECT] * 8
    assert verdict(judge) is Status.CORRECT, "the worker outlives the thread that started it"


def test_a_forked_process_gets_a_worker_of_its_own(judge):
    assert verdict(judge) is Status.CORRECT
    child = os.fork()
    if child == 0:
        os._exit(0 if verdict(judge) is Status.CORRECT else 1)
    _, code = os.waitpid(child, 0)
    assert code == 0
    assert verdict(judge) is Status.CORRECT


def test_closing_leaves_no_process_and_the_judge_usable():
    judge = Judge()
    assert verdict(judge) is Status.CORRECT
    pids = processes_of(judge._supervisor._process.pid)
    judge.close()
    judge.close()
    assert wait_until(lambda: gone(pids))
    assert verdict(judge) is Status.CORRECT
    judge.close()


def busy(pid):
    """Whether a process has used processor time lately."""
    ticks = [int(value) for value in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]]
    return sum(ticks) >= 10


ENDLESS = r"ask(r'\boxed{\sqrt{10^{20}}!}')" "\n"
LEFT_ALONE = {
    "idle": "time.sleep(60)",
    "busy": ENDLESS + "time.sleep(60)",
}


@pytest.mark.parametrize("state", LEFT_ALONE)
def test_no_worker_outlives_a_killed_parent(state):
    code = (
        "import time\n"
        "from routing_lab.answers import Judge\n"
        "judge = Judge()\n"
        "ask = lambda text: judge.judge(text, expected='y', answer_type='expression')\n"
        r"ask(r'\boxed{x}')"
        "\n"
        "print(judge._supervisor._process.pid, flush=True)\n" + LEFT_ALONE[state]
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pids = processes_of(int(parent.stdout.readline()))
    assert len(pids) == 2
    assert wait_until(lambda: state == "idle" or busy(pids[1]))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: gone(pids))


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_no_worker_outlives_a_judge_that_was_forgotten(state):
    judge = Judge()
    assert verdict(judge) is Status.CORRECT
    process = judge._supervisor._process
    pids = processes_of(process.pid)
    if state == "busy":
        request = {"id": 0, "expected": write_tree(parse("y")), "given": write_tree(parse(r"\sqrt{10^{20}}!"))}
        process.stdin.write(json.dumps(request).encode() + b"\n")
        assert wait_until(lambda: busy(pids[1]))
    process.stdin.close()
    process.stdout.close()
    assert wait_until(lambda: process.poll() is not None and gone(pids))


def test_a_worker_that_cannot_start_is_an_error_with_its_last_words(monkeypatch):
    monkeypatch.setattr(supervisor_module, "_RUN", "raise SystemExit('no sympy here')")
    with Judge() as judge, pytest.raises(RuntimeFailureError) as caught:
        verdict(judge)
    assert "no sympy here" in caught.value.log_tail


def test_the_judge_leaves_signals_of_the_process_alone(judge):
    before = [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGPROF, signal.SIGINT)]
    verdict(judge)
    assert [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGPROF, signal.SIGINT)] == before
