"""The parent's side of the symbolic worker: start it late, ask it, and never wait longer than the limits say.

The time limits are the worker's own (the kernel kills it); this side adds a deadline on top, after which the whole
worker is killed and the next question starts a new one. No signal handler and no thread of ours is involved, so it
works from any thread, which is where limits based on ``signal.alarm`` stop working.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any, Final, Literal

from routing_lab.answers.limits import WORKER_START_S, WORKER_WALL_S
from routing_lab.answers.syntax import Node
from routing_lab.answers.worker import write_tree
from routing_lab.errors import RuntimeFailureError

__all__ = ["Supervisor"]

_GRACE_S: Final = 0.15
"""How long after the worker's own wall limit it is given up: then not even the kernel's timer has ended it."""

_RUN: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]); from routing_lab.answers.worker import main; main(int(sys.argv[2]))"
)
_ROOT: Final = str(Path(__file__).resolve().parents[2])


class _WorkerLostError(Exception):
    """The worker's process is gone, or no longer answers."""


class Supervisor:
    """Owns at most one worker process; ``compare`` is safe from any thread and after a ``fork``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._owner = 0
        self._unread = b""
        self._last_id = 0

    def compare(self, expected: Node, given: Node) -> Literal["yes", "no", "undecided"]:
        """Ask whether two answers are equal; a worker that dies over it makes it ``undecided``.

        Raises:
            RuntimeFailureError: No worker can be started.
        """
        with self._lock:
            self._start_if_needed()
            self._last_id += 1
            request = {"id": self._last_id, "expected": write_tree(expected), "given": write_tree(given)}
            try:
                self._send(json.dumps(request).encode() + b"\n")
                return self._answer_to(self._last_id)
            except _WorkerLostError:
                self._stop()
                return "undecided"

    def close(self) -> None:
        """End the worker; the next comparison would start another one."""
        with self._lock:
            self._stop()

    def _answer_to(self, wanted: int) -> Literal["yes", "no", "undecided"]:
        deadline = time.monotonic() + WORKER_WALL_S + _GRACE_S
        while True:
            message = self._receive(deadline)
            if "ready" in message:
                # The child that had the question is gone: a limit, or a failure inside sympy.
                return "undecided"
            if message["id"] == wanted:
                equal: Literal["yes", "no", "undecided"] = message["equal"]
                return equal

    def _start_if_needed(self) -> None:
        if self._owner != os.getpid():
            # After a fork the pipes belong to the other process; leave them to it.
            self._process, self._owner = None, os.getpid()
        if self._process is not None and self._process.poll() is None:
            return
        self._stop()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-c", _RUN, _ROOT, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
        )
        self._unread = b""
        try:
            self._receive(time.monotonic() + WORKER_START_S)
        except _WorkerLostError:
            tail = self._log_tail()
            self._stop()
            raise RuntimeFailureError(
                "the process that compares expressions does not start (is sympy installed?)", tail
            ) from None

    def _log_tail(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0)
        return self._log.read()[-2_000:].decode(errors="replace")

    def _send(self, line: bytes) -> None:
        """Write a request; a worker that does not read it within the limits is lost."""
        assert self._process is not None  # noqa: S101 - started by the caller
        assert self._process.stdin is not None  # noqa: S101 - a pipe was asked for
        try:
            self._process.stdin.write(line)
        except OSError as error:
            raise _WorkerLostError from error

    def _receive(self, deadline: float) -> dict[str, Any]:
        assert self._process is not None  # noqa: S101 - started by the caller
        assert self._process.stdout is not None  # noqa: S101 - a pipe was asked for
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise _WorkerLostError
            chunk = os.read(descriptor, 65_536)
            if not chunk:
                raise _WorkerLostError
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe:
                    pipe.close()
        if self._log is not None:
            self._log.close()
            self._log = None
