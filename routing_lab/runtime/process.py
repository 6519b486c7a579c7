"""Starts, questions and ends the model's own process; whatever happens to it becomes one exception."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from routing_lab.errors import RuntimeFailureError
from routing_lab.overrides import CONTROL_ENV, EXPERTS_ENV, PRELOAD_ENV, WATCH_ENV, other_preloads
from routing_lab.runtime import channel

__all__ = ["LAST_BREATH_S", "LogTail", "ModelProcess", "ending", "is_first_thread"]

_LOG_BYTES = 16_384
_END_S = 30.0
LAST_BREATH_S = 10.0
"""From a process's last word to its end; a busy machine that also writes a core takes seconds."""
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class LogTail:
    """Keeps the last bytes that a process writes, and keeps its pipe empty."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._tail = b""
        self._thread = threading.Thread(target=self._drain, args=(pipe,), daemon=True)
        self._thread.start()

    def _drain(self, pipe: IO[bytes]) -> None:
        with pipe:
            while chunk := os.read(pipe.fileno(), 4096):
                self._tail = (self._tail + chunk)[-_LOG_BYTES:]

    def text(self, *, ended: bool) -> str:
        """What is kept; waits for the last words of a process that has ended."""
        if ended:
            self._thread.join(timeout=2.0)
        return self._tail.decode("utf-8", "replace")


def _environment(library_dir: Path | None) -> dict[str, str]:
    environment = dict(os.environ)
    # Meant for a server: the child gets its schedules by message.
    for name in (EXPERTS_ENV, CONTROL_ENV, WATCH_ENV):
        environment.pop(name, None)
    if PRELOAD_ENV in environment:
        environment[PRELOAD_ENV] = other_preloads(environment[PRELOAD_ENV])
    # The child imports the very package that runs here, however that was found.
    paths = [str(_PACKAGE_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    # Without this a failed assertion starts a debugger to print its stack.
    environment["GGML_NO_BACKTRACE"] = "1"
    if library_dir:
        environment["LLAMA_CPP_LIB_PATH"] = str(library_dir)
    return environment


def is_first_thread() -> bool:
    """Whether the calling thread is the one that the process began with: it lasts as long as the process."""
    return threading.get_native_id() == os.getpid()


class ModelProcess:
    """One child process and the line to it.

    It gets a session of its own, so that Ctrl-C in the terminal reaches only the lab, and it ends when the line closes.
    """

    def __init__(self, *, library_dir: Path | None, request_timeout_s: float) -> None:
        self._timeout_s = request_timeout_s
        ours, theirs = socket.socketpair()
        with theirs:
            # -P keeps the working directory out of the child's import path.
            command = [sys.executable, "-P", "-X", "faulthandler", "-m", "routing_lab.runtime.llama_child"]
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), "parent" if is_first_thread() else "line"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=_environment(library_dir),
            )
        self._line = Connection(ours.detach())
        weakref.finalize(self, _end, self._process, self._line)  # whoever forgets to close leaves nothing behind
        assert self._process.stdout is not None, "asked for a pipe"  # noqa: S101
        self._log = LogTail(self._process.stdout)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def request(self, do: str, **fields: Any) -> channel.Message:  # noqa: ANN401
        """Ask and wait for the answer.

        Raises what the child reports. Where it dies, hangs or reports a failure, the process is gone for certain when
        ``RuntimeFailureError`` arrives; so it is after an interrupt, because an answer would then be left in the line.
        """
        try:
            reply = self._exchange({"do": do, **fields})
        except (EOFError, OSError):
            raise self._failure(f"{self._how_it_ended()} while it was asked to {do}") from None
        except BaseException:
            self.close()
            raise
        error = reply.get("error")
        if error is None:
            answer: channel.Message = reply["ok"]
            return answer
        branch = channel.ERROR_KINDS[error["kind"]]
        if branch is RuntimeFailureError:
            self.close()
            raise self._failure(error["message"])
        raise branch(error["message"])

    def _exchange(self, message: channel.Message) -> channel.Message:
        channel.send(self._line, message)
        if not self._line.poll(self._timeout_s):
            raise self._failure(f"the model's process did not answer {message['do']} within {self._timeout_s:g} s")
        return channel.receive(self._line)

    def _failure(self, message: str) -> RuntimeFailureError:
        self.close()
        return RuntimeFailureError(message, self._log.text(ended=True))

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=LAST_BREATH_S)
        except subprocess.TimeoutExpired:
            return "the model's process closed its line"
        return f"the model's process {ending(code)}"

    def log_tail(self) -> str:
        """The last words that the process wrote (libllama's log)."""
        return self._log.text(ended=self._process.poll() is not None)

    @property
    def closed(self) -> bool:
        """Whether the process was given up."""
        return self._line.closed

    def close(self) -> None:
        """End the process whatever state it is in, and wait until it is gone; safe to call twice."""
        _end(self._process, self._line)


def ending(code: int) -> str:
    """How a process ended, from its return code as ``subprocess`` gives it."""
    if code >= 0:
        return f"ended with exit code {code}"
    reasons = {signal.SIGABRT: " (an assertion in libllama)", signal.SIGKILL: " (for instance out of memory)"}
    try:
        number = signal.Signals(-code)
    except ValueError:  # most real-time signals have no name
        return f"was ended by signal {-code}"
    return f"was ended by {number.name}{reasons.get(number, '')}"


def _end(process: subprocess.Popen[bytes], line: Connection) -> None:
    line.close()
    process.kill()
    try:
        process.wait(timeout=_END_S)
    except subprocess.TimeoutExpired:
        raise RuntimeFailureError(f"process {process.pid} does not end even when killed (a hung driver?)") from None
