"""Opens files for reading, and only files: a named pipe would keep the lab waiting for ever, a device has no end."""

from __future__ import annotations

import errno
import stat
from pathlib import Path
from typing import BinaryIO, Final

__all__ = ["open_file", "what_it_is"]

_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_file(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Open ``path`` for reading bytes.

    Raises ``OSError`` where it cannot be read or is no regular file (its ``strerror`` says what it is), ``ValueError``
    for a name with a NUL in it.
    """
    # Asked before it is opened: opening a pipe waits for a writer, and opening some devices does something.
    if kind := what_it_is(path):
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))
    return path.open("rb", buffering=buffering)


def what_it_is(path: Path) -> str:
    """What stands where a file should: ``a folder``, ``a named pipe`` ...; empty for a file. Raises as ``stat``."""
    mode = path.stat().st_mode
    return "" if stat.S_ISREG(mode) else next((kind for test, kind in _KINDS if test(mode)), "something else")
