"""Finds and reads what the override library reports from inside a server: the counts its graphs were built with.

The report is an anonymous file of the server's process (see ``native/expert_override.cpp``), so that it needs no path,
ends with the process, and can be read only on the same machine and by the same user (or root).
"""

from __future__ import annotations

import ipaddress
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from routing_lab.errors import AttestationError, RuntimeUnsupportedError
from routing_lab.overrides import OVERRIDE_NAME

__all__ = [
    "Address",
    "BuiltBlock",
    "ListeningSocket",
    "ServedSchedule",
    "ServerReport",
    "has_graphs",
    "listening_processes",
    "parse_report",
    "plain_address",
    "program_of",
    "reached",
    "read_report",
    "require_linux",
    "served_schedule",
    "server_processes",
    "sockets_listening_on",
]

_LINK = "/memfd:routing_lab_report"
_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp
Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

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

    ``decode`` is the graph of a single token, ``batch`` that of more. ``source`` says where the schedule comes from:
    ``environment``, ``command line``, ``control file`` or ``nothing``, and ``unknown`` under an older library;
    ``refused`` why the last control file was not taken.
    """

    generation: int
    experts: str
    refused: str | None
    decode: Mapping[int, BuiltBlock]
    batch: Mapping[int, BuiltBlock]
    source: str = "unknown"


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
        source=words.get("source", "unknown"),
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


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    """A TCP socket of this machine that waits for connections: its inode and the address that it is bound to."""

    inode: str
    address: Address


def sockets_listening_on(port: int) -> tuple[ListeningSocket, ...]:
    """The sockets that listen on ``port``, whoever they belong to (Linux)."""
    found: list[ListeningSocket] = []
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            columns = row.split()
            address, _, number = columns[1].rpartition(":")
            if columns[3] == _LISTEN and int(number, 16) == port:
                found.append(ListeningSocket(columns[9], _address(address)))
    return tuple(found)


def _address(text: str) -> Address:
    """An address as /proc/net prints it: words of 32 bits, each in the byte order of the machine."""
    words = (bytes.fromhex(text[at : at + 8]) for at in range(0, len(text), 8))
    return plain_address(b"".join(word[::-1] if sys.byteorder == "little" else word for word in words))


def plain_address(address: str | bytes) -> Address:
    """``address``, an IPv4 one also where IPv6 wraps it. Raises ``ValueError`` for what is none."""
    parsed = ipaddress.ip_address(address)
    return (parsed.version == 6 and parsed.ipv4_mapped) or parsed  # noqa: PLR2004 - of the protocol


def reached(sockets: Sequence[ListeningSocket], addresses: Collection[Address]) -> tuple[ListeningSocket, ...]:
    """Those of ``sockets`` that a connection to one of ``addresses`` reaches: bound to it, else to all addresses."""
    exact = tuple(socket for socket in sockets if socket.address in addresses)
    return exact or tuple(socket for socket in sockets if socket.address.is_unspecified)


def listening_processes(port: int, among: Sequence[int] | None = None) -> list[int]:
    """Processes that listen on ``port``, of those this user may look into; ``among`` narrows the search."""
    return _holders(sockets_listening_on(port), among)


def _holders(sockets: Sequence[ListeningSocket], among: Sequence[int] | None = None) -> list[int]:
    wanted = {f"socket:[{socket.inode}]" for socket in sockets}
    if not wanted:
        return []
    if among is None:
        among = sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return [process for process in among if any(target in wanted for _, target in _links(process))]


@dataclass(frozen=True, slots=True)
class ServedSchedule:
    """The schedule of a running server, read back from the graphs that it built last.

    ``experts_used`` are the counts of the graph that decodes, ``prompt_experts_used`` those of the graph for prompts
    (the same, or between a switch and the next prompt the last ones), ``own`` the model's. ``source`` says where the
    schedule came from. ``next_graph`` is the schedule that was ordered and is in no graph yet, as text, ``None`` where
    there is none. ``refused`` is why the last order was not taken.
    """

    process: int
    program: str
    generation: int
    experts_used: Mapping[int, int]
    prompt_experts_used: Mapping[int, int]
    own: Mapping[int, int]
    source: str
    next_graph: str | None
    refused: str | None


def require_linux() -> None:
    """Raise ``RuntimeUnsupportedError`` where there is no ``/proc`` to find servers and reports in."""
    if not sys.platform.startswith("linux"):
        raise RuntimeUnsupportedError(f"a server's report can be read only on Linux, and this is {sys.platform}")


def server_processes(port: int, addresses: Collection[Address] = ()) -> list[int]:
    """The processes that a connection to ``port`` of one of ``addresses`` reaches (empty: of any); at least one.

    Raises:
        RuntimeUnsupportedError: Nothing listens there, the process is another user's, or several have graphs and share
            the port, so that chance decides which one answers.
    """
    listening = sockets_listening_on(port)
    sockets = reached(listening, addresses) if addresses else listening
    if not sockets:
        others = ", ".join(sorted({str(socket.address) for socket in listening}))
        where = f" at {' or '.join(sorted(map(str, addresses)))}, only at {others}" if others else ""
        raise RuntimeUnsupportedError(f"nothing listens on port {port} of this machine{where}")
    processes = _holders(sockets)
    if not processes:
        raise RuntimeUnsupportedError(
            f"the process that listens on port {port} is another user's (or a container's); run attest as that user"
        )
    if len(sockets) > 1 and len(serving := [one for one in processes if has_graphs(one)]) > 1:
        raise RuntimeUnsupportedError(
            f"processes {', '.join(map(str, serving))} all listen on port {port}, each with a schedule of its own: end "
            "all but one, or name the address of one"
        )
    return processes


def served_schedule(process: int, where: str) -> ServedSchedule:
    """The schedule that ``process`` serves; ``where`` says in a message what is known about it.

    Raises:
        RuntimeUnsupportedError: It does not run under the override library, or has built no graph yet.
        AttestationError: A block adds up another number of experts than it selects.
    """
    report = read_report(process)
    if report is not None and report.batch and not report.decode:
        raise RuntimeUnsupportedError(
            f"process {process} ({program_of(process)}), {where}, runs under the override library and has built graphs "
            "of several tokens only, as a server of several slots does when it starts: send it any request first"
        )
    if report is None or not report.decode:
        raise RuntimeUnsupportedError(_no_report(process, where))
    for rows in (report.decode, report.batch):
        for block, row in rows.items():
            if row.summed != row.selected:
                detail = f"that is the length of the sum over its experts, in process {process} ({where})"
                raise AttestationError(block, row.selected, row.summed, detail)
    waits = any(row.generation != report.generation for row in report.decode.values())
    return ServedSchedule(
        process=process,
        program=program_of(process),
        generation=report.generation,
        experts_used={block: row.selected for block, row in report.decode.items()},
        prompt_experts_used={block: row.selected for block, row in report.batch.items()},
        own={block: row.asked for block, row in report.decode.items()},
        source=report.source,
        next_graph=report.experts if waits else None,
        refused=report.refused,
    )


def has_graphs(process: int) -> bool:
    """Whether ``process`` reports graphs with routed experts."""
    report = read_report(process)
    return report is not None and bool(report.decode or report.batch)


def _has_ended(process: int) -> bool:
    """Whether it is gone, or only not collected yet (a zombie, which has no files and no memory)."""
    return _read_text(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()[:1] in ([], ["Z"], ["X"])


def _no_report(process: int, where: str) -> str:
    if _has_ended(process):
        return f"process {process}, {where}, has just ended"
    named = f"process {process} ({program_of(process)}), {where},"
    if OVERRIDE_NAME in _read_text(Path(f"/proc/{process}/maps")):
        return (
            f"{named} runs under the override library and has built no graph yet: it is still loading, has no routed "
            "experts, or its libllama does not call the library (linked with -Bsymbolic)"
        )
    return (
        f"{named} does not run under the override library, so nothing tells its counts; start it as routing-lab export "
        "says (LD_PRELOAD)"
    )


def program_of(process: int) -> str:
    """The name of the program that ``process`` runs."""
    return _read_text(Path(f"/proc/{process}/comm")).strip() or "unknown"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
