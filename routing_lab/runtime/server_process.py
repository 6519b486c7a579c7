"""Starts, questions and ends one llama-server; whatever happens to it becomes one exception."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from routing_lab.errors import RuntimeFailureError, RuntimeUnsupportedError
from routing_lab.model import FrozenMap
from routing_lab.overrides import (
    CONTROL_ENV,
    EXPERTS_ENV,
    OVERRIDE_NAME,
    PRELOAD_ENV,
    WATCH_ENV,
    can_be_preloaded,
    other_preloads,
    render_control,
)
from routing_lab.runtime.process import LAST_BREATH_S, LogTail, ending, is_first_thread
from routing_lab.runtime.report import ServerReport, listening_processes, read_report

__all__ = ["HOST", "ServerProcess"]

HOST: Final = "127.0.0.1"
_OK, _CLIENT_ERRORS = 200, range(400, 500)
_PORT_TRIES = 5
_PORT_TAKEN = "couldn't bind HTTP server socket"
_HEALTH_S = 5.0  # for one question; a server that loads answers at once that it does
_END_S = 30.0
_TELLING_LINES = 6
# Options may also come from the environment, and the lab's server is started with its own alone. LLAMA_SERVER_ makes it
# a router's child, and AIP_ moves it to another port.
_FOREIGN = ("LLAMA_ARG_", "LLAMA_LOG_", "LLAMA_API_KEY", "LLAMA_SERVER_", "LLAMA_APP_", "AIP_")

Message = dict[str, Any]


def free_port() -> int:
    """A port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class _PortTakenError(Exception):
    """Another program took the port first."""


class ServerProcess:
    """One llama-server under the override library, and the ways to it: HTTP, control file, report.

    It gets a session of its own, so that Ctrl-C in the terminal reaches only the lab. It ends when the lab does, in
    whatever way: the override library watches a pipe whose other end only the lab holds.

    Args:
        command: Makes the argument list for a port.
        library: The override library.
        request_timeout_s: How long starting, or one request, may take before the server counts as hung.
        environment: More variables; an ``LD_PRELOAD`` among them must name the library itself.
        port: The port to use (default: a free one).

    Raises:
        RuntimeUnsupportedError: The server ended by itself before it was ready; its own words say why.
        RuntimeFailureError: It was killed, or was not ready in time.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        library: Path,
        request_timeout_s: float,
        *,
        environment: Mapping[str, str] = FrozenMap({}),
        port: int | None = None,
    ) -> None:
        self._more = environment
        self._timeout_s = request_timeout_s
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="routing-lab-"))
        except OSError as error:
            raise RuntimeUnsupportedError(f"there is no place for the server's control file: {error}") from error
        self._clean = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._control = self._folder / "control"
        self._generation = 0
        # LD_PRELOAD cannot quote a path; a link whose own path needs no quoting can name any.
        self._library = self._folder / f"{OVERRIDE_NAME}.so"
        if not can_be_preloaded(self._library):
            raise RuntimeUnsupportedError(f"LD_PRELOAD cannot name {self._library}: set TMPDIR to a plain path")
        try:
            self._library.symlink_to(library)
        except OSError as error:  # a disk without links, or without room
            raise RuntimeUnsupportedError(f"{self._library} cannot be made: {error.strerror or error}") from error
        tries = _PORT_TRIES if port is None else 1
        for left in range(tries - 1, -1, -1):
            self._port = free_port() if port is None else port
            self._launch(command(self._port))
            try:
                self._wait_until_ready()
            except _PortTakenError:
                self._end()
                if left == 0:
                    self.close()
                    if port is not None:
                        raise RuntimeUnsupportedError(f"port {port} is taken by another program") from None
                    raise RuntimeFailureError(f"{tries} ports in a row were taken by others") from None
                continue
            except BaseException:
                self.close()
                raise
            break

    # ---- starting --------------------------------------------------------------------------------------------------

    def _launch(self, argv: Sequence[str]) -> None:
        watched, ours = os.pipe()
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[watched],
                start_new_session=True,
                env=self._environment(watched),
            )
        except OSError as error:
            os.close(ours)
            self._clean()
            raise RuntimeUnsupportedError(f"{argv[0]} cannot be started: {error.strerror or error}") from error
        finally:
            os.close(watched)
        # Whoever forgets to close leaves nothing behind.
        self._end: Callable[[], None] = weakref.finalize(self, _end, self._process, ours)
        assert self._process.stdout is not None, "asked for a pipe"  # noqa: S101
        self._log = LogTail(self._process.stdout)

    def _environment(self, watched: int) -> dict[str, str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
        environment.pop(EXPERTS_ENV, None)
        # Without this a failed assertion starts a debugger to print its stack.
        environment["GGML_NO_BACKTRACE"] = "1"
        others = other_preloads(environment.get(PRELOAD_ENV, ""))
        environment[PRELOAD_ENV] = f"{self._library} {others}".rstrip()
        # The kernel would end it with the thread that starts it, so this must be one that stays.
        watch = f"{watched},parent" if is_first_thread() else str(watched)
        return environment | dict(self._more) | {CONTROL_ENV: str(self._control), WATCH_ENV: watch}

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        pause = 0.02
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise self._refused()
            # Another program may have taken the port, and may answer in our server's stead.
            if listening_processes(self._port, [self.pid]) and self._healthy():
                return
            time.sleep(pause)
            pause = min(0.25, 1.5 * pause)
        raise self._failure(f"llama-server was not ready within {self._timeout_s:g} s")

    def _healthy(self) -> bool:
        try:
            return self._exchange("GET", "/health", None, min(_HEALTH_S, self._timeout_s))[0] == _OK
        except (OSError, http.client.HTTPException):
            return False

    def _refused(self) -> Exception:
        """Why the server ended before it was ready."""
        code = self._process.returncode
        log = self._log.text(ended=True)
        if code >= 0 and _PORT_TAKEN in log:
            return _PortTakenError()
        message = f"llama-server {ending(code)} before it was ready"
        return (
            RuntimeFailureError(message, log) if code < 0 else RuntimeUnsupportedError(_with_last_words(message, log))
        )

    # ---- talking ---------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._port

    @property
    def closed(self) -> bool:
        """Whether the server was given up."""
        return not self._clean.alive

    def request(self, path: str, body: Message | None = None) -> Message:
        """Ask and wait for the answer: a POST, or a GET without a body.

        Raises:
            RuntimeUnsupportedError: The server refuses the request (status 4xx) and goes on.
            RuntimeFailureError: It died, hung or failed, and is gone for certain now.
        """
        try:
            status, answer = self._exchange("GET" if body is None else "POST", path, body, self._timeout_s)
            reply: Message = json.loads(answer)
        except TimeoutError:
            raise self._failure(f"llama-server did not answer {path} within {self._timeout_s:g} s") from None
        except (OSError, http.client.HTTPException, ValueError):
            raise self._failure(f"{self._how_it_ended()} while it was asked for {path}") from None
        except BaseException:
            self.close()  # an answer nobody waits for would keep the slot busy
            raise
        if self._process.poll() is not None:  # another program may have taken the port since, and answered
            raise self._failure(f"{self._how_it_ended()} while it was asked for {path}")
        if status == _OK:
            return reply
        said = _error_message(reply)
        if status in _CLIENT_ERRORS:
            raise RuntimeUnsupportedError(f"llama-server refuses {path}: {said}")
        raise self._failure(f"llama-server failed in {path}: {said}")

    def _exchange(self, method: str, path: str, body: Message | None, timeout_s: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=timeout_s)
        with contextlib.closing(connection):
            text = None if body is None else json.dumps(body, allow_nan=False).encode()
            connection.request(method, path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()

    def switch(self, experts: str) -> int:
        """Order the counts ``experts`` for the next graph; the generation that the report will show.

        Raises:
            RuntimeFailureError: The file cannot be written; the server was given up.
        """
        self._generation += 1
        draft = self._folder / "control.new"
        try:
            draft.write_text(render_control(self._generation, experts), encoding="ascii")
            draft.replace(self._control)  # it appears whole
        except OSError as error:  # a full disk, or a folder that somebody cleaned away
            raise self._failure(f"the server's control file cannot be written: {error}") from error
        return self._generation

    def report(self) -> ServerReport | None:
        """What the server's graphs were built with."""
        return read_report(self.pid)

    def log_tail(self) -> str:
        """The last words of the server's log."""
        return self._log.text(ended=self._process.poll() is not None)

    # ---- ending ----------------------------------------------------------------------------------------------------

    def _failure(self, message: str) -> RuntimeFailureError:
        self.close()
        return RuntimeFailureError(message, self._log.text(ended=True))

    def _how_it_ended(self) -> str:
        try:
            return f"llama-server {ending(self._process.wait(timeout=LAST_BREATH_S))}"
        except subprocess.TimeoutExpired:
            return "llama-server broke off its answer"

    def close(self) -> None:
        """End the server whatever state it is in, and wait until it is gone; safe to call twice."""
        self._end()
        self._clean()


def _end(process: subprocess.Popen[bytes], watch: int) -> None:
    os.close(watch)
    process.kill()
    try:
        process.wait(timeout=_END_S)
    except subprocess.TimeoutExpired:
        raise RuntimeFailureError(f"process {process.pid} does not end even when killed (a hung driver?)") from None


def _error_message(reply: object) -> str:
    error = reply.get("error") if isinstance(reply, dict) else None
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _with_last_words(message: str, log: str) -> str:
    """Add the lines of the log in which the server says what went wrong."""
    signs = ("error", "failed", "invalid", "routing_lab:", "unable")
    telling = [line.strip() for line in log.splitlines() if any(sign in line.lower() for sign in signs)]
    return "\n  ".join([message, *telling[-_TELLING_LINES:]])
