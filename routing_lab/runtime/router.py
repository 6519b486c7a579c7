"""What runs at an address: one llama-server and its schedule, or llama-server's router and those of its servers.

The router (``llama-server --models-preset``) loads no model itself: it starts a server for each model that somebody
asks for, and passes requests on. Those servers are its child processes, so their reports are found without asking
anybody; only the names of models that are not loaded come from the router (``GET /models``).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shlex
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from routing_lab.errors import AttestationError, RuntimeUnsupportedError, UsageError
from routing_lab.overrides import ServerCommand
from routing_lab.runtime.report import (
    Address,
    ServedSchedule,
    has_graphs,
    plain_address,
    program_of,
    require_linux,
    served_schedule,
    server_processes,
    sockets_listening_on,
)
from routing_lab.visible import visible

__all__ = ["ServedModel", "ServedRouter", "served_at"]

_MARK = "LLAMA_SERVER_ROUTER_PORT="  # what the router adds to the environment of its servers
_ROUTER_OPTIONS = frozenset({"--models-preset", "--models-dir"})
_ASK_S = 3.0
_MOST_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a router has loaded: its name there, and its schedule, or why that cannot be read."""

    name: str
    process: int
    served: ServedSchedule | None
    problem: str | None

    def require(self) -> ServedSchedule:
        """The schedule. Raises ``RuntimeUnsupportedError`` where it cannot be read."""
        if self.served is None:
            raise RuntimeUnsupportedError(self.problem or f"nothing tells the counts of {self.name}")
        return self.served


@dataclass(frozen=True, slots=True)
class ServedRouter:
    """A router: the models that it has loaded, and the names of those that it could load (empty: it does not say)."""

    url: str
    process: int
    program: str
    models: tuple[ServedModel, ...]
    not_loaded: tuple[str, ...]

    def model(self, name: str) -> ServedModel:
        """The loaded model ``name``.

        Raises:
            UsageError: The router has no such model.
            RuntimeUnsupportedError: It has one, and it is not loaded.
        """
        for model in self.models:
            if model.name == name:
                return model
        if name in self.not_loaded:
            how = self.how_to_load(name)
            raise RuntimeUnsupportedError(f"the router at {self.url} has not loaded {name} yet; {how}")
        known = ", ".join([*(model.name for model in self.models), *self.not_loaded])
        raise UsageError(f"the router at {self.url} has no model {name}; it has {known or 'none loaded'}")

    def how_to_load(self, name: str | None = None) -> str:
        """What to do so that a model is loaded."""
        body = json.dumps({"model": name or next(iter(self.not_loaded), "NAME")})
        return f"any request that names it loads it, or curl {self.url}/models/load -d {shlex.quote(body)}"

    def require_models(self) -> None:
        """Raise ``RuntimeUnsupportedError`` where nothing can be read: no model is loaded, or none tells its counts."""
        if not self.models:
            known = f" of {', '.join(self.not_loaded)}" if self.not_loaded else ""
            raise RuntimeUnsupportedError(
                f"the router at {self.url} (process {self.process}) has loaded none{known} yet; {self.how_to_load()}"
            )
        if all(model.served is None for model in self.models):
            raise RuntimeUnsupportedError("\n".join(model.problem or model.name for model in self.models))


def served_at(url: str) -> ServedSchedule | ServedRouter:
    """What the llama-server that listens at ``url`` runs; it must be on this machine and of this user.

    Raises:
        UsageError: ``url`` is no address with a port.
        RuntimeUnsupportedError: This is no Linux; it is another machine; nothing listens there; the process is another
            user's, or does not run under the override library and is no router.
        AttestationError: A block adds up another number of experts than it selects.
    """
    require_linux()
    parts, port, addresses = _local(url)
    processes = server_processes(port, addresses)
    for process in processes:
        if not has_graphs(process) and (router := _router(process, parts)) is not None:
            return router
    process = next(filter(has_graphs, processes), processes[0])
    return served_schedule(process, f"which listens on port {port}")


def _local(url: str) -> tuple[SplitResult, int, frozenset[Address]]:
    """The address in parts, its port, and the addresses of this machine that it may mean (none: any)."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{url} is no address such as http://127.0.0.1:8080: {error}") from None
    if not host or not port or parts.scheme not in {"http", "https"}:
        raise UsageError(f"{url} is no address with a port, such as http://127.0.0.1:8080")
    if host == "localhost":
        return parts, port, frozenset(map(plain_address, ("127.0.0.1", "::1")))
    with contextlib.suppress(ValueError):
        address = plain_address(host)
        if address.is_unspecified:  # as a server prints it that listens everywhere
            return parts, port, frozenset()
        if address.is_loopback or any(address == socket.address for socket in sockets_listening_on(port)):
            return parts, port, frozenset([address])
    raise RuntimeUnsupportedError(
        f"{host} is not this machine's loopback: a server's report can be read only on the machine that it runs on, so "
        f"run attest there, with http://127.0.0.1:{port}"
    )


def _router(process: int, url: SplitResult) -> ServedRouter | None:
    """The router that ``process`` is; ``None`` where it is none."""
    children = dict(_children(process))
    is_router = bool(children) or not _ROUTER_OPTIONS.isdisjoint(_words(process, "cmdline"))
    if not is_router and "llama" not in program_of(process):
        return None
    names = _names(url)
    if not is_router and names is None:
        return None
    return ServedRouter(
        url=f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path.rstrip('/')}",  # a password is nobody's to print
        process=process,
        program=program_of(process),
        models=tuple(_model(name, child) for name, child in sorted(children.items())),
        not_loaded=tuple(name for name in names or () if name not in children),
    )


def _model(name: str, process: int) -> ServedModel:
    try:
        return ServedModel(name, process, served_schedule(process, f"which serves {name}"), None)
    except AttestationError:
        raise
    except RuntimeUnsupportedError as error:
        return ServedModel(name, process, None, str(error))


def _children(router: int) -> Iterator[tuple[str, int]]:
    """Name and process of each server that ``router`` started; of two with one name the younger comes last."""
    for process in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()):
        if _parent(process) == router and any(word.startswith(_MARK) for word in _words(process, "environ")):
            name = ServerCommand({}, _words(process, "cmdline")).value("--alias")
            yield visible(name or f"process {process}"), process


def _parent(process: int) -> int | None:
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace")
        if match := re.search(r"^PPid:\s*(\d+)$", status, re.MULTILINE | re.ASCII):
            return int(match[1])
    return None


def _words(process: int, file: str) -> tuple[str, ...]:
    try:
        text = Path(f"/proc/{process}/{file}").read_bytes()
    except OSError:  # ended, or another user's
        return ()
    return tuple(word.decode("utf-8", "replace") for word in text.split(b"\0"))


def _names(url: SplitResult) -> list[str] | None:
    """All models that the router at ``url`` knows; ``None`` where this is no router, or it does not say."""
    if url.scheme != "http":
        return None
    connection = http.client.HTTPConnection(url.hostname or "127.0.0.1", url.port, timeout=_ASK_S)
    with contextlib.closing(connection):
        try:
            connection.connect()
            with _at_most(_ASK_S, connection.sock):
                connection.request("GET", f"{url.path.rstrip('/')}/models")
                reply = json.loads(connection.getresponse().read(_MOST_BYTES))
            # Only a router says whether a model is loaded.
            return [visible(model["id"]) for model in reply["data"] if model["status"]["value"]]
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, RecursionError):
            return None


@contextlib.contextmanager
def _at_most(seconds: float, line: socket.socket) -> Iterator[None]:
    """Hang up after so long: the time limit of a socket is for each piece, and pieces may come for ever."""

    def hang_up() -> None:
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)

    limit = threading.Timer(seconds, hang_up)
    limit.daemon = True
    limit.start()
    try:
        yield
    finally:
        limit.cancel()
