"""The digest that names the bytes of a model."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from routing_lab.errors import Problem, UserFileError
from routing_lab.files import open_file
from routing_lab.model.facts import ModelFacts

__all__ = ["model_digest"]

_CHUNK_BYTES = 4 * 1024 * 1024


def model_digest(facts: ModelFacts) -> str:
    """``sha256:`` and the SHA-256 of the model's files, one after the other; for one file it is what sha256sum prints.

    Reads every byte, so it takes as long as reading the model from disk, in constant memory. Within a process a file
    that has kept its size and its time of change is read once. Raises ``UserFileError`` where a file cannot be read or
    has another size than it had before it was read.
    """
    return _digest(tuple(_identity(path) for path in facts.files))


def _identity(path: Path) -> tuple[str, int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from None
    return str(path), status.st_size, status.st_mtime_ns, status.st_ino


@functools.lru_cache(maxsize=16)
def _digest(files: tuple[tuple[str, int, int, int], ...]) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK_BYTES)
    window = memoryview(buffer)
    for name, expected_bytes, *_ in files:
        read_bytes = 0
        try:
            with open_file(Path(name), buffering=0) as file:
                while size := file.readinto(buffer):  # type: ignore[attr-defined] # of every binary file
                    digest.update(window[:size])
                    read_bytes += size
        except OSError as error:
            raise _unreadable(Path(name), error) from None
        if read_bytes != expected_bytes:
            what = f"changed while it was read: {read_bytes} bytes instead of {expected_bytes}"
            raise UserFileError(name, [Problem("", what, "wait until nothing writes to it")])
    return f"sha256:{digest.hexdigest()}"


def _unreadable(path: Path, error: OSError) -> UserFileError:
    return UserFileError(str(path), [Problem("", f"cannot be read: {error.strerror or error}")])
