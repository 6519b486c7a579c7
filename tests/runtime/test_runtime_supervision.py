"""The model's process may abort, hang or be killed; the lab goes on and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from routing_lab.errors import RuntimeFailureError, RuntimeUnsupportedError, UserFileError
from routing_lab.runtime import RuntimeOptions
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.runtime.process import _LOG_BYTES, LogTail
from routing_lab.schedule import Schedule

pytestmark = pytest.mark.model

CONTEXT = 8192
LONG = 8000  # tokens; seconds of decoding on any machine that runs these tests


@pytest.fixture
def runtime(model: Path) -> Iterator[LlamaRuntime]:
    with LlamaRuntime(model, RuntimeOptions(context_tokens=CONTEXT, request_timeout_s=120)) as one:
        yield one


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie that nobody collects has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def signal_soon(pid: int, number: signal.Signals) -> None:
    threading.Timer(0.3, os.kill, (pid, number)).start()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
def test_a_process_that_ends_while_it_decodes_is_one_failure(
    runtime: LlamaRuntime, mixed: Schedule, number: signal.Signals
) -> None:
    runtime.apply(mixed)
    before = runtime.generate("Q: 3+4=?\n", max_tokens=12)
    lost = runtime.process_id
    signal_soon(lost, number)
    with pytest.raises(RuntimeFailureError, match=f"ended by {number.name}.* while it was asked to decode_timing"):
        runtime.decode_timing(tokens=LONG)
    assert gone(lost)
    assert runtime.process_id is None
    assert runtime.generate("Q: 3+4=?\n", max_tokens=12).text == before.text
    assert runtime.process_id != lost
    assert runtime.weight_loads == 2


def test_the_failure_carries_the_last_words_of_the_process(runtime: LlamaRuntime) -> None:
    runtime.apply(Schedule.baseline(runtime.facts))
    signal_soon(runtime.process_id, signal.SIGABRT)
    with pytest.raises(RuntimeFailureError) as caught:
        runtime.decode_timing(tokens=LONG)
    assert "Aborted" in caught.value.log_tail


def test_a_process_that_hangs_is_given_up_after_the_timeout_and_killed_for_certain(model: Path) -> None:
    with LlamaRuntime(model, RuntimeOptions(context_tokens=256, request_timeout_s=10)) as runtime:
        runtime.apply(Schedule.baseline(runtime.facts))
        hung = runtime.process_id
        os.kill(hung, signal.SIGSTOP)
        with pytest.raises(RuntimeFailureError, match="did not answer generate within 10 s"):
            runtime.generate("7", max_tokens=4)
        assert gone(hung)
        assert runtime.generate("7", max_tokens=4).tokens >= 1


def test_a_failed_switch_leaves_the_last_schedule_that_worked(runtime: LlamaRuntime, mixed: Schedule) -> None:
    baseline = Schedule.baseline(runtime.facts)
    runtime.apply(baseline)
    before = runtime.logits("7+5")
    os.kill(runtime.process_id, signal.SIGKILL)
    with pytest.raises(RuntimeFailureError):
        runtime.apply(mixed)
    assert runtime.logits("7+5") == before


def test_an_interrupt_leaves_no_answer_in_the_line(runtime: LlamaRuntime) -> None:
    runtime.apply(Schedule.baseline(runtime.facts))
    lost = runtime.process_id
    signal_soon(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        runtime.decode_timing(tokens=LONG)
    assert gone(lost)
    assert runtime.decode_timing(tokens=4).tokens == 4


def test_ctrl_c_in_the_terminal_does_not_reach_the_process(runtime: LlamaRuntime) -> None:
    assert os.getsid(runtime.process_id) == runtime.process_id != os.getsid(0)


PARENT = """
import sys, threading, time
from pathlib import Path
from routing_lab.runtime import RuntimeOptions, open_runtime
runtime = open_runtime(Path(sys.argv[1]), RuntimeOptions(context_tokens=8192))
print(runtime.process_id, flush=True)
if sys.argv[2] == "busy":
    runtime.decode_timing(tokens=8000)
time.sleep(600)
"""


@pytest.mark.parametrize("state", ["idle", "busy", "stopped"])
def test_the_process_does_not_outlive_a_killed_parent(model: Path, state: str) -> None:
    command = [sys.executable, "-c", PARENT, str(model), state]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        time.sleep(0.5)
        assert not gone(child)
        if state == "stopped":
            os.kill(child, signal.SIGSTOP)
        parent.kill()
        parent.wait()
        assert wait_until(lambda: gone(child))


def test_the_process_outlives_the_thread_that_started_it(model: Path) -> None:
    started: list[LlamaRuntime] = []
    thread = threading.Thread(
        target=lambda: started.append(LlamaRuntime(model, RuntimeOptions(context_tokens=256, threads=1)))
    )
    thread.start()
    thread.join()
    with started[0] as runtime:
        first = runtime.process_id
        runtime.apply(Schedule.baseline(runtime.facts))
        assert runtime.generate("7", max_tokens=2).tokens >= 1
        assert runtime.process_id == first


def test_closing_ends_the_process_and_a_later_call_starts_another(runtime: LlamaRuntime) -> None:
    first = runtime.process_id
    runtime.close()
    assert gone(first)
    assert runtime.generate("7", max_tokens=2).tokens >= 1
    assert runtime.process_id not in {None, first}


def test_a_runtime_that_nobody_closes_leaves_no_process(model: Path) -> None:
    forgotten = LlamaRuntime(model, RuntimeOptions(context_tokens=256))
    pid = forgotten.process_id
    del forgotten
    assert wait_until(lambda: gone(pid))


def test_a_schedule_in_the_environment_is_for_servers_and_changes_nothing_here(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUTING_LAB_EXPERTS", "not even a schedule")
    with LlamaRuntime(model, RuntimeOptions(context_tokens=256)) as runtime:
        assert dict(runtime.apply(Schedule.baseline(runtime.facts)).selected) == dict(runtime.facts.experts_used)


def test_a_file_that_is_no_model_is_the_users_file_error(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + b"\xff" * 100)
    with pytest.raises(UserFileError):
        LlamaRuntime(bad)


def test_a_model_that_libllama_refuses_is_named_with_libllamas_own_reason(rewritten: Callable[..., Path]) -> None:
    refused = rewritten({"tokenizer.ggml.model": "telepathy"})
    with pytest.raises(RuntimeUnsupportedError, match=r"(?s)cannot load .*rewritten\.gguf.*telepathy"):
        LlamaRuntime(refused, RuntimeOptions(context_tokens=256))


def test_the_log_is_bounded_and_keeps_the_end() -> None:
    ours, theirs = os.pipe()
    tail = LogTail(os.fdopen(ours, "rb", buffering=0))
    with os.fdopen(theirs, "wb") as pipe:
        for _ in range(200):
            pipe.write(b"x" * 4096)
        pipe.write(b"the last words\n")
    text = tail.text(ended=True)
    assert text.endswith("the last words\n")
    assert len(text) <= _LOG_BYTES


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 // 0 }}",
        "{{ messages[7].content }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_that_fails_in_whatever_way_is_the_models_fault_and_no_crash(
    rewritten: Callable[..., Path], template: str
) -> None:
    model = rewritten({"tokenizer.chat_template": template})
    with LlamaRuntime(model, RuntimeOptions(context_tokens=256)) as runtime:
        process = runtime.process_id
        with pytest.raises(RuntimeUnsupportedError, match=r"chat template of .* fails"):
            runtime.render_chat("2+2?")
        assert runtime.generate("Q: 2+2=?\n", max_tokens=4).tokens == 4
        assert runtime.process_id == process


def test_a_path_and_a_stop_string_that_are_no_unicode_are_taken(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / os.fsdecode(b"m\xff.gguf")
    shutil.copy(model, copy)
    with LlamaRuntime(copy, RuntimeOptions(context_tokens=256)) as runtime:
        made = runtime.generate("Q: 2+2=?\n", max_tokens=8, stop=["\ud800"])
        assert made.tokens > 0
        assert made.text == runtime.generate("Q: 2+2=?\n", max_tokens=8).text
