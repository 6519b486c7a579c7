"""Finds and reads what the override library reports from inside a server: the counts its graphs were built with.

The report is an anonymous file of the server's process (see ``native/expert_override.cpp``), so that it needs no path,
ends with the process, and can be read only on the same machine and by the same user (or root).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from routing_lab.errors import AttestationError, RuntimeUnsupportedError, UsageError

__all__ = [
    "BuiltBlock",
    "ServedSchedule",
    "ServerReport",
    "listening_processes",
    "parse_report",
    "read_report",
    "served_schedule",
    "sockets_listening_on",
]

_LINK = "/memfd:routing_lab_report"
_OVERRIDE = "expert_override"  # in the name of the library's file
_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp
_TRIES = 50  # a report is renewed in microseconds; a torn one this often in a row is none


@dataclass(frozen=True, slots=True)
class BuiltBlock:
    """What one block was built with, last time.

    ``asked`` is the count that llama.cpp wanted (the model's own), ``selected`` the one it was given, ``summed`` the
    length of the sum over the experts' outputs (-1: not seen), ``generation`` that of the schedule in force.
    """

    asked: int
    selected: int
    summed: int
    generation: int


@dataclass(frozen=True, slots=True)
class ServerReport:
    """One report: the schedule for the next graph, and by block what the last graphs were built with.

    ``decode`` is the graph of a single token, ``batch`` that of more. ``refused`` says why the last control file was
    not taken.
    """

    generation: int
    experts: str
    refused: str | None
    decode: Mapping[int, BuiltBlock]
    batch: Mapping[int, BuiltBlock]


def parse_report(text: str) -> ServerReport | None:
    """The report in ``text``; ``None`` where the text is not whole."""
    lines = text.split("\n")
    sequence = re.fullmatch(r"sequence (\d+)", lines[1], re.ASCII) if len(lines) > 1 else None
    if lines[0] != "routing_lab report 1" or sequence is None or lines[-2:] != [f"end {sequence[1]}", ""]:
        return None
    words: dict[str, str] = {}
    rows: dict[str, dict[int, BuiltBlock]] = {"decode": {}, "batch": {}}
    for line in lines[2:-2]:
        name, _, rest = line.partition(" ")
        if name in rows:
            block, *numbers = map(int, rest.split())
            rows[name][block] = BuiltBlock(*numbers)
        else:
            words[name] = rest
    return ServerReport(
        generation=int(words["generation"]),
        experts=words["experts"],
        refused=words.get("refused"),
        decode=rows["decode"],
        batch=rows["batch"],
    )


def _links(process: int) -> Iterator[tuple[Path, str]]:
    """Every open file of ``process`` and its target; none where the process is gone or another user's."""
    try:
        links = list(Path(f"/proc/{process}/fd").iterdir())
    except OSError:
        return
    for link in links:
        try:
            yield link, str(link.readlink())
        except OSError:  # closed meanwhile
            continue


def read_report(process: int) -> ServerReport | None:
    """The report of ``process``; ``None`` where it has none (no override library, or no graph built yet).

    Raises:
        RuntimeUnsupportedError: There is a report and it cannot be read.
    """
    for link, target in _links(process):
        if target.startswith(_LINK):
            return _read_whole(link)
    return None


def _read_whole(path: Path) -> ServerReport | None:
    for _ in range(_TRIES):
        try:
            text = path.read_text(encoding="ascii", errors="replace")
        except OSError:  # the process ended
            return None
        try:
            if (report := parse_report(text)) is not None:
                return report
        except (KeyError, TypeError, ValueError):  # whole, and not what this version writes
            break
    raise RuntimeUnsupportedError(f"{path} holds no report that this version of routing_lab can read")


def sockets_listening_on(port: int) -> frozenset[str]:
    """Inodes of the TCP sockets of this machine that listen on ``port``, whoever they belong to (Linux)."""
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            columns = row.split()
            if columns[3] == _LISTEN and int(columns[1].rpartition(":")[2], 16) == port:
                found.add(columns[9])
    return frozenset(found)


def listening_processes(port: int, among: Sequence[int] | None = None) -> list[int]:
    """Processes that listen on ``port``, of those this user may look into; ``among`` narrows the search."""
    wanted = {f"socket:[{inode}]" for inode in sockets_listening_on(port)}
    if not wanted:
        return []
    if among is None:
        among = sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return [process for process in among if any(target in wanted for _, target in _links(process))]


@dataclass(frozen=True, slots=True)
class ServedSchedule:
    """The schedule of a running server, read back from the graphs that it built last.

    ``experts_used`` are the counts of the graph that decodes, ``prompt_experts_used`` those of the graph for prompts
    (the same, or between a switch and the next prompt the last ones), ``own`` the model's. ``next_graph`` is the
    schedule that was ordered and is in no graph yet, as text, ``None`` where there is none. ``refused`` is why the last
    order was not taken.
    """

    process: int
    program: str
    generation: int
    experts_used: Mapping[int, int]
    prompt_experts_used: Mapping[int, int]
    own: Mapping[int, int]
    next_graph: str | None
    refused: str | None


def served_schedule(url: str) -> ServedSchedule:
    """The schedule of the llama-server that listens at ``url``, which must be on this machine and of this user.

    Raises:
        UsageError: ``url`` is no address with a port.
        RuntimeUnsupportedError: This is no Linux; it is another machine; nothing listens there; the process is another
            user's, or does not run under the override library.
        AttestationError: A block adds up another number of experts than it selects.
    """
    if not sys.platform.startswith("linux"):
        raise RuntimeUnsupportedError(f"a server's report can be read only on Linux, and this is {sys.platform}")
    process, report = _report_at(_local_port(url))
    for rows in (report.decode, report.batch):
        for block, row in rows.items():
            if row.summed != row.selected:
                raise AttestationError(
                    block, row.selected, row.summed, "that is the length of the sum over its experts"
                )
    waits = any(row.generation != report.generation for row in report.decode.values())
    return ServedSchedule(
        process=process,
        program=_program(process),
        generation=report.generation,
        experts_used={block: row.selected for block, row in report.decode.items()},
        prompt_experts_used={block: row.selected for block, row in report.batch.items()},
        own={block: row.asked for block, row in report.decode.items()},
        next_graph=report.experts if waits else None,
        refused=report.refused,
    )


def _local_port(url: str) -> int:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{url} is no address such as http://127.0.0.1:8080: {error}") from None
    if not host or port is None or parts.scheme not in {"http", "https"}:
        raise UsageError(f"{url} is no address with a port, such as http://127.0.0.1:8080")
    if not (host in {"localhost", "::1", "0.0.0.0"} or host.startswith("127.")):  # noqa: S104 - compared, not bound
        raise RuntimeUnsupportedError(
            f"{host} is not this machine's loopback: a server's report can be read only on the machine that it runs "
            f"on, so run attest there, with http://127.0.0.1:{port}"
        )
    return port


def _report_at(port: int) -> tuple[int, ServerReport]:
    if not sockets_listening_on(port):
        raise RuntimeUnsupportedError(f"nothing listens on port {port} of this machine")
    processes = listening_processes(port)
    if not processes:
        raise RuntimeUnsupportedError(
            f"the process that listens on port {port} is another user's (or a container's); run attest as that user"
        )
    for process in processes:
        if (report := read_report(process)) is not None and report.decode:
            return process, report
    process = processes[0]
    named = f"process {process} ({_program(process)}), which listens on port {port},"
    if _OVERRIDE in _read_text(Path(f"/proc/{process}/maps")):
        raise RuntimeUnsupportedError(
            f"{named} runs under the override library and has built no graph yet: it is still loading, has no routed "
            "experts, or its libllama does not call the library (linked with -Bsymbolic)"
        )
    raise RuntimeUnsupportedError(
        f"{named} does not run under the override library, so nothing tells its counts; start it as routing-lab export "
        "says (LD_PRELOAD)"
    )


def _program(process: int) -> str:
    return _read_text(Path(f"/proc/{process}/comm")).strip() or "unknown"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
