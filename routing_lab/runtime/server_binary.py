"""Finds a llama-server, and says before it is started whether the expert override fits it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from routing_lab.errors import RuntimeUnsupportedError
from routing_lab.runtime.symbols import unfit_reason

__all__ = ["BUILT_BY_MAKE", "ServerBinary", "find_server", "server_program"]

LLAMA_CPP_PYTHON: Final = "0.3.36"
_NAME: Final = "llama-server"
BUILT_BY_MAKE: Final = (
    Path(__file__).resolve().parents[2] / ".cache" / f"llama.cpp-{LLAMA_CPP_PYTHON}" / "bin" / "llama-server"
)
"""Where ``make llama-server`` puts it, in a checkout."""
_ASK_S = 30.0
# As ld.so lists it: "libllama.so.0 => /usr/lib/libllama.so.0 (0x7f...)", or by its path alone where that was linked.
_LIBLLAMA = re.compile(r"^\s*(?:libllama\.so\S* => )?(/.*/libllama\.so[^/]*) \(0x[0-9a-f]+\)$", re.MULTILINE)
_NOT_FOUND = re.compile(r"^\s*(\S+) => not found$", re.MULTILINE)
_MOST_BYTES = 1 << 16
_WAYS_OUT = "name one with --llama-server PATH, put one on PATH, or build it once with make llama-server"


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A llama-server that the override fits. ``version`` and ``built`` are its own words."""

    path: Path
    libllama: Path
    version: str
    built: str


def find_server(named: Path | None = None) -> ServerBinary:
    """The llama-server to use: the one ``named``, else the one on PATH, else the one that make built.

    Raises:
        RuntimeUnsupportedError: There is none, it is no program, or the override does not fit its libllama.
    """
    path = _locate(named)
    version, built = _version(path)
    libllama, missing = _libllama_of(path)
    found = f"{path} ({version or 'it tells no version'})"
    if missing:
        raise RuntimeUnsupportedError(
            f"{path} cannot start: the dynamic linker does not find {', '.join(missing)}; a llama-server needs the "
            f"libraries that were built with it (leave it in its folder, or set LD_LIBRARY_PATH), or {_WAYS_OUT}"
        )
    if libllama is None:
        raise RuntimeUnsupportedError(
            f"{found} loads no shared libllama: {_why_none(path)}, and per-block counts "
            f"need a shared libllama of llama.cpp from September or October 2026; {_WAYS_OUT}"
        )
    if reason := unfit_reason(libllama):
        raise RuntimeUnsupportedError(f"{found} cannot run per-block counts: {reason}; {_WAYS_OUT}")
    return ServerBinary(path, libllama, version or "unknown version", built)


def server_program(named: Path | None = None) -> str:
    """What a command line calls the server of ``find_server``: by its name alone where that finds it.

    Nothing is asked of the program. Where there is none the name has to do: the command may be for another machine.

    Raises:
        RuntimeUnsupportedError: The one that was ``named`` is no program.
    """
    if named is None and (shutil.which(_NAME) or not os.access(BUILT_BY_MAKE, os.X_OK)):
        return _NAME
    return str(_locate(named))


def _locate(named: Path | None) -> Path:
    if named is not None:
        # ./NAME and NAME are one path here, so a program of that name in this folder is meant before one on PATH.
        found = shutil.which(named.absolute()) or shutil.which(named)
        if found is None:
            what = "is a folder" if named.is_dir() else "is not executable" if named.exists() else "does not exist"
            raise RuntimeUnsupportedError(f"the llama-server {named} {what}; {_WAYS_OUT}")
        return Path(found).absolute()
    on_path = shutil.which(_NAME)
    if on_path is not None:
        return Path(on_path).absolute()
    if os.access(BUILT_BY_MAKE, os.X_OK):
        return BUILT_BY_MAKE
    raise RuntimeUnsupportedError(f"there is no llama-server here; {_WAYS_OUT}")


def _why_none(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        if file.read(2) == b"#!":
            return "it is a script, and what it starts is unknown here, so name that program itself"
    return "it is linked statically, or is no llama-server"


def _ask(path: Path, *arguments: str, **environment: str) -> str:
    """The first that the program prints; empty where it does not end, or prints without an end."""
    inherited = {key: value for key, value in os.environ.items() if key not in {"LD_PRELOAD"} | environment.keys()}
    try:
        process = subprocess.Popen(
            [str(path), *arguments],
            env=inherited | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise RuntimeUnsupportedError(f"{path} cannot be run: {error.strerror or error}; {_WAYS_OUT}") from error
    assert process.stdout is not None, "asked for a pipe"  # noqa: S101
    try:
        said = _read_until(process.stdout.fileno(), time.monotonic() + _ASK_S)
    finally:
        # It may be a script that started others; none of them is left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    return said.decode("utf-8", "replace")


def _read_until(pipe: int, deadline: float) -> bytes:
    """All that comes through ``pipe``; nothing where it goes on after the deadline or is more than any answer."""
    said = b""
    while len(said) <= _MOST_BYTES:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return b""
        piece = os.read(pipe, _MOST_BYTES)
        if not piece:
            return said
        said += piece
    return b""


def _version(path: Path) -> tuple[str, str]:
    """The version and how it was built, in the program's own words; empty where it does not say."""
    words: dict[str, str] = {}
    for line in _ask(path, "--version").splitlines():
        for name in ("version: ", "built with "):
            if line.startswith(name):
                words.setdefault(name, line.removeprefix("version: ").strip()[:200])
    return words.get("version: ", ""), words.get("built with ", "")


def _libllama_of(path: Path) -> tuple[Path | None, list[str]]:
    """The libllama that the dynamic linker would load for the program, and the libraries that it does not find.

    A program that is linked dynamically is not even started.
    """
    listed = _ask(path, "--version", LD_TRACE_LOADED_OBJECTS="1")
    found = _LIBLLAMA.search(listed)
    return Path(found[1]) if found else None, sorted(set(_NOT_FOUND.findall(listed)))
