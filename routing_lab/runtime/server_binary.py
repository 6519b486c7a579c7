"""Finds a llama-server, and says before it is started whether the expert override fits it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from routing_lab.errors import RuntimeUnsupportedError
from routing_lab.runtime.symbols import unfit_reason

__all__ = ["BUILT_BY_MAKE", "ServerBinary", "find_server"]

LLAMA_CPP_PYTHON: Final = "0.3.36"
BUILT_BY_MAKE: Final = (
    Path(__file__).resolve().parents[2] / ".cache" / f"llama.cpp-{LLAMA_CPP_PYTHON}" / "bin" / "llama-server"
)
"""Where ``make llama-server`` puts it, in a checkout."""
_ASK_S = 30.0
# As ld.so lists it: "libllama.so.0 => /usr/lib/libllama.so.0 (0x7f...)", or by its path alone where that was linked.
_LIBLLAMA = re.compile(r"^\s*(?:libllama\.so\S* => )?(/.*/libllama\.so[^/]*) \(0x[0-9a-f]+\)$", re.MULTILINE)
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
    libllama = _libllama_of(path)
    found = f"{path} ({version or 'it tells no version'})"
    if libllama is None:
        raise RuntimeUnsupportedError(
            f"{found} loads no shared libllama: it is linked statically, or is no llama-server, and per-block counts "
            f"need a shared libllama of llama.cpp from September or October 2026; {_WAYS_OUT}"
        )
    if reason := unfit_reason(libllama):
        raise RuntimeUnsupportedError(f"{found} cannot run per-block counts: {reason}; {_WAYS_OUT}")
    return ServerBinary(path, libllama, version or "unknown version", built)


def _locate(named: Path | None) -> Path:
    if named is not None:
        # A bare name is looked for on PATH, as a shell does.
        found = shutil.which(named)
        if found is None:
            what = "is a folder" if named.is_dir() else "is not executable" if named.exists() else "does not exist"
            raise RuntimeUnsupportedError(f"the llama-server {named} {what}; {_WAYS_OUT}")
        return Path(found).absolute()
    on_path = shutil.which("llama-server")
    if on_path is not None:
        return Path(on_path).absolute()
    if os.access(BUILT_BY_MAKE, os.X_OK):
        return BUILT_BY_MAKE
    raise RuntimeUnsupportedError(f"there is no llama-server here; {_WAYS_OUT}")


def _ask(path: Path, *arguments: str, **environment: str) -> str:
    """What the program prints; empty where it cannot run."""
    inherited = {key: value for key, value in os.environ.items() if key not in {"LD_PRELOAD"} | environment.keys()}
    try:
        done = subprocess.run(
            [str(path), *arguments],
            env=inherited | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_ASK_S,
            check=False,
        )
    except OSError as error:
        raise RuntimeUnsupportedError(f"{path} cannot be run: {error.strerror or error}; {_WAYS_OUT}") from error
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.decode("utf-8", "replace")


def _version(path: Path) -> tuple[str, str]:
    """The version and how it was built, in the program's own words; empty where it does not say."""
    words: dict[str, str] = {}
    for line in _ask(path, "--version").splitlines():
        for name in ("version: ", "built with "):
            if line.startswith(name):
                words.setdefault(name, line.removeprefix("version: ").strip()[:200])
    return words.get("version: ", ""), words.get("built with ", "")


def _libllama_of(path: Path) -> Path | None:
    """The libllama that the dynamic linker would load for the program; a linked one is not even started."""
    found = _LIBLLAMA.search(_ask(path, "--version", LD_TRACE_LOADED_OBJECTS="1"))
    return Path(found[1]) if found else None
