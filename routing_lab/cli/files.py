"""Files that a command line names: inputs that would hang, and outputs that are written whole or not at all."""

from __future__ import annotations

import argparse
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from routing_lab.errors import Problem, UsageError, UserFileError

__all__ = ["check_output", "check_outputs", "refuse_special_files", "write_output"]

OUTPUTS = ("output", "csv", "figure", "sensitivity")
"""Options that name a file to write; every other path that a command gets is read."""

_TEXTS = ("storage", "source")
"""Options that may name a file and may be something else."""

_STDIN = Path("/dev/stdin")
_TRIAL_BYTES = 64 * 1024
_SPECIAL: Mapping[int, str] = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def refuse_special_files(args: argparse.Namespace) -> None:
    """Refuse pipes, sockets and devices as inputs: reading one may wait for ever, or never come to an end.

    Raises:
        UserFileError: An option names one, or something that no file can be called; ``/dev/stdin`` is taken, except as
            a model.
    """
    for name, path in _inputs(args):
        _refuse_impossible_name(path)
        if path == _STDIN and name != "model":
            continue
        if (kind := _SPECIAL.get(_type(path))) is not None:
            raise UserFileError(str(path), [Problem("", f"is {kind}, and a regular file is needed", "copy it to one")])


def _refuse_impossible_name(path: Path) -> None:
    """After this, asking whether the file is there raises nothing."""
    try:
        path.stat()
    except (OSError, ValueError) as error:  # ValueError: a NUL in it
        if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
            return
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserFileError(str(path)[:80], [Problem("", f"cannot be the name of a file: {reason}")]) from None


def _inputs(args: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    for name, value in vars(args).items():
        if name not in OUTPUTS:
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, Path) or (name in _TEXTS and one):
                    yield name, Path(one)


def _type(path: Path) -> int:
    """The type bits of the file, 0 where there is none."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except (OSError, ValueError):
        return 0


# ---------------------------------------------------------------------------------------------------------------------
# Outputs


def check_outputs(args: argparse.Namespace, *, inputs: Iterable[Path] = ()) -> None:
    """Find out before the work, not after it, that a result cannot be written; ``inputs`` are read besides the options.

    Raises:
        UsageError: An output is one of the inputs, or two outputs are one file.
        UserFileError: It cannot be written.
    """
    outputs = {name: value for name in OUTPUTS if isinstance(value := getattr(args, name, None), Path)}
    read = [*inputs, *(path for _, path in _inputs(args))]
    for name, path in outputs.items():
        if any(_same(path, other) for other in read):
            raise UsageError(f"--{name} {path} would write over a file that this command reads; name another one")
        if any(_same(path, other) for title, other in outputs.items() if title < name):
            raise UsageError(f"--{name} {path} is named twice: each output needs a file of its own")
    for path in outputs.values():
        check_output(path)


def _same(path: Path, other: Path) -> bool:
    try:
        return path.resolve() == other.resolve() or path.samefile(other)
    except (OSError, ValueError, RuntimeError):  # one is not there, or links lead in a circle
        return False


def check_output(path: Path) -> None:
    """Make the folder of ``path`` and try to write there. Raises ``UserFileError`` where that is not possible."""
    with _reporting(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if _is_stream(path):
            # Without waiting for a reader: a pipe that nobody reads is an error too.
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        trial = _beside(path.resolve())
        try:
            _write(trial, bytes(_TRIAL_BYTES))  # on a full disk an empty file can still be made
        finally:
            trial.unlink(missing_ok=True)


def write_output(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` whole: what was there stays until everything is on the disk.

    Raises:
        UserFileError: It cannot be written.
    """
    with _reporting(path):
        if _is_stream(path):
            with path.open("wb", buffering=0) as stream:
                stream.write(content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.resolve()  # a link goes on leading there
        trial = _beside(target)
        try:
            _write(trial, content)
            with suppress(FileNotFoundError):
                trial.chmod(stat.S_IMODE(target.stat().st_mode))
            trial.replace(target)
        finally:
            trial.unlink(missing_ok=True)


def _is_stream(path: Path) -> bool:
    """Whether ``path`` takes bytes one after the other, as ``/dev/stdout`` does. Raises for a disk or a socket."""
    kind = _type(path)
    if kind in {stat.S_IFBLK, stat.S_IFSOCK}:
        raise OSError(errno.EINVAL, f"it is {_SPECIAL[kind]}")
    return kind in {stat.S_IFIFO, stat.S_IFCHR}


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    """Turn what the system says about an output into ``UserFileError``."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the name; links that lead in a circle
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UserFileError(str(path), [Problem("", f"cannot be written: {reason}")]) from None
