"""Studies on disk: an SQLite file that Optuna owns, opened with care and read through one typed door.

Every failure of the file (locked, full, damaged, not ours) is a ``UserFileError`` that says what to do.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import sqlite3
import time
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import optuna
import sqlalchemy
from optuna.storages import RDBStorage

from routing_lab.errors import Problem, UsageError, UserFileError
from routing_lab.files import open_file, what_it_is
from routing_lab.search.records import SCHEMA, BaselineRecord, StudyRecord, TrialRecord

__all__ = [
    "BASELINE",
    "STUDY",
    "TRANSCRIPTS",
    "TRIAL",
    "OpenFile",
    "check_study_name",
    "load_study",
    "open_storage",
    "quiet_optuna",
    "read_study",
    "read_trials",
    "reporting_storage_errors",
    "storage_path",
    "study_lock",
    "study_names",
]

STUDY: Final = "routing_lab"
"""Study attribute: schema, identity, facts, settings."""
BASELINE: Final = "routing_lab.baseline"
"""Study attribute: the measured baseline."""
TRANSCRIPTS: Final = "routing_lab.transcripts"
"""Study attribute: the baseline's completions, which serve as drafts."""
TRIAL: Final = "routing_lab"
"""Trial attribute: the whole record of a trial."""

LOCK_WAIT_S: Final = 10
"""How long a write waits for another process to finish its own."""

_OPENINGS: Final = 5
_OPENING_PAUSE_S: Final = 0.2
_LOST_A_RACE: Final = re.compile("UNIQUE constraint failed|already exists")

_URL: Final = "sqlite:///"
_STUDY_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_HEADER: Final = b"SQLite format 3\0"

_DAMAGED: Final = "restore it from a copy, or take another file with --storage"

# What SQLite says -> what it means and the way out. The first match counts.
_SQLITE_PROBLEMS: Final = (
    ("locked", "is locked by another process", "end that process, or take another file with --storage"),
    ("disk is full", "cannot grow: the disk is full", "make room and run the same command again; results are saved"),
    ("disk i/o error", "cannot be written: input/output error", "check the disk; results are saved"),
    ("readonly", "cannot be written", "check its permissions and those of its folder"),
    ("unable to open", "cannot be opened", "check that its folder exists and may be written"),
    ("malformed", "is damaged", _DAMAGED),
    ("not a database", "is no SQLite database", "take another file with --storage"),
    ("no such table", "is no Optuna storage", "take another file with --storage"),
    ("no such column", "was made by another version of Optuna", "optuna storage upgrade --storage, or another file"),
)


def storage_path(storage: Path | str) -> Path:
    """The file that ``storage`` names: a path, or the same as ``sqlite:///path``.

    Raises:
        UsageError: Another kind of URL, or a name with braces (Optuna would fill them in).
    """
    text = str(storage)
    if text.startswith(_URL):
        text = text.removeprefix(_URL)
    elif "://" in text or text.startswith("sqlite:"):
        raise UsageError(f"storage {text} is not supported: studies live in SQLite files (a path, or {_URL}path)")
    if not text or "{" in text or "}" in text or "?" in text or "\0" in text:
        raise UsageError(f"storage {text!r} is no file name (empty, or with one of {{ }} ? in it)")
    return Path(text)


def check_study_name(name: str) -> None:
    """Refuse names that do not work in file names and shells. Raises ``UsageError``."""
    if not _STUDY_NAME.fullmatch(name):
        raise UsageError(f"study name {name!r}: use up to 100 letters, digits, dots, dashes and underscores")


# ---------------------------------------------------------------------------------------------------------------------
# Opening


def open_storage(storage: Path | str, *, create: bool) -> RDBStorage:
    """Open the storage; ``create`` makes the file and its folder where they are missing.

    Raises:
        UsageError: ``storage`` names no file.
        UserFileError: The file is missing (without ``create``), or is not a storage of Optuna's.
    """
    path = storage_path(storage)
    _check_file(path, create=create)
    with reporting_storage_errors(path), quiet_optuna():
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            backend = _opened(path)
        except RuntimeError as error:  # Optuna's word for tables of another version
            raise UserFileError(str(path), [Problem("", str(error), "or take another file with --storage")]) from None
        sqlalchemy.event.listen(backend.engine, "connect", _spare_the_disk)
        backend.engine.dispose()  # so that the first connection, made before the listener, is not used on
    return backend


class OpenFile:
    """The file of an open storage, which somebody may remove or replace while a study of hours writes to it.

    SQLite goes on writing to a file without a name then, and all of it is gone with the process.
    """

    def __init__(self, path: Path, backend: RDBStorage) -> None:
        self._path, self._backend = path, backend
        self._known = self._identity()

    def require(self) -> None:
        """Look whether the file is still the one that was opened.

        Raises:
            UserFileError: It is not. What the storage holds was written to a file again, which the error names.
        """
        if self._identity() == self._known:
            return
        rescued = self._path
        for number in itertools.count(1):
            if not os.path.lexists(rescued):
                break
            rescued = self._path.with_name(f"{self._path.stem}-rescued-{number}{self._path.suffix}")
        self._save(rescued)
        way_out = "it was written again, and the same command goes on"
        if rescued != self._path:
            way_out = f"what it held is in {rescued}: go on with --storage {rescued}"
        raise UserFileError(str(self._path), [Problem("", "was removed or replaced while the study ran", way_out)])

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The log that SQLite writes ahead belongs to the old file; beside another one it would spoil it.
        for ending in ("-wal", "-shm"):
            path.with_name(path.name + ending).unlink(missing_ok=True)
        source = self._backend.engine.raw_connection()
        try:
            held = source.driver_connection
            assert held is not None, "it has not been detached"  # noqa: S101 - SQLAlchemy's type
            with closing(sqlite3.connect(path)) as target:
                held.backup(target)
        finally:
            source.close()


def _opened(path: Path) -> RDBStorage:
    """Optuna's storage in ``path``, its tables made where they are missing.

    Optuna looks for a table and then makes it, and a second process may do the same in between. One of the two then
    fails, and needs only to look again.
    """
    for attempt in itertools.count(1):
        try:
            return RDBStorage(f"{_URL}{path}", engine_kwargs={"connect_args": {"timeout": LOCK_WAIT_S}})
        except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
            if attempt == _OPENINGS or not _LOST_A_RACE.search(_innermost(error)):
                raise
            time.sleep(_OPENING_PAUSE_S)
    raise AssertionError("the last attempt returns or raises")


def _spare_the_disk(connection: sqlite3.Connection, _record: object) -> None:
    """Write ahead instead of syncing at every commit.

    A trial makes a dozen commits. With a rollback journal each of them waits for the disk, which on a spinning one is
    longer than the demo model needs for a probe. In this mode a killed process loses nothing, and only a power cut can
    lose the last trial, never the file (https://www.sqlite.org/wal.html). Where it is impossible (a network share),
    SQLite stays with the journal by itself.
    """
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")


def _check_file(path: Path, *, create: bool) -> None:
    """Refuse what is not ours before Optuna adds its tables to it."""
    if not path.exists():
        if create:
            return
        raise UserFileError(str(path), [Problem("", "there is no such storage", "name the one that search wrote")])
    _refuse_no_file(path)
    with reporting_storage_errors(path):
        try:
            with open_file(path) as file:
                head = file.read(len(_HEADER))
        except OSError as error:
            raise UserFileError(str(path), [Problem("", f"cannot be read: {error.strerror}")]) from None
        if not head and create:
            return
        if head != _HEADER:
            raise UserFileError(str(path), [_sqlite_problem("not a database")])
        tables = _tables(path)
    if (tables and "studies" not in tables) or not (tables or create):
        raise UserFileError(str(path), [_sqlite_problem("no such table")])


def _refuse_no_file(path: Path) -> None:
    """Refuse a folder, a pipe or a device before anything is written to it or beside it."""
    with suppress(OSError):  # what is not there can be made, and what cannot be looked at fails where it is opened
        if kind := what_it_is(path):
            raise UserFileError(str(path), [Problem("", f"is {kind}", "name a file, for instance runs/studies.db")])


def _tables(path: Path) -> set[str]:
    connection = sqlite3.connect(path, timeout=LOCK_WAIT_S)
    try:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    finally:
        connection.close()


@contextmanager
def study_lock(storage: Path | str, study: str) -> Iterator[None]:
    """Hold the study for this process. It ends with the process, however that ends.

    Two searches on one study would each take the other's running trial for an abandoned one.

    Raises:
        UsageError: Another process holds it.
        UserFileError: The storage is no file, or its lock cannot be written beside it.
    """
    path = storage_path(storage)
    _refuse_no_file(path)
    lock = path.with_name(f"{path.name}-{study}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        what = f"cannot be locked: nothing can be written beside it ({error.strerror})"
        raise UserFileError(str(path), [Problem("", what, "take another file with --storage")]) from None
    try:
        if not _is_locked(handle, lock):
            raise UsageError(f"another process is running study {study} in {path}; wait for it, or give --study")
        try:
            yield
        finally:
            with suppress(OSError):
                lock.unlink()
    finally:
        os.close(handle)


def _is_locked(handle: int, lock: Path) -> bool:
    """Try to lock an open file, and see that the name still leads to it: its last holder removes it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(handle), lock.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def study_names(storage: Path | str) -> list[str]:
    """Names of the studies in a storage. Raises as ``load_study``."""
    backend = open_storage(storage, create=False)
    with reporting_storage_errors(storage_path(storage)):
        return sorted(optuna.get_all_study_names(backend))


def load_study(storage: Path | str, name: str | None = None) -> StudyRecord:
    """Read a study; ``name`` may be left out where the storage holds only one.

    Raises:
        UsageError: There is no such study, or several and no name.
        UserFileError: The storage is missing or damaged, or was written by a newer routing_lab.
    """
    backend = open_storage(storage, create=False)
    path = storage_path(storage)
    with reporting_storage_errors(path), quiet_optuna():
        names = sorted(optuna.get_all_study_names(backend))
        if name is None and len(names) == 1:
            name = names[0]
        if name not in names:
            wanted = "which study?" if name is None else f"there is no study {name} in {path};"
            raise UsageError(f"{wanted} {path} holds {', '.join(names) or 'none'} (choose with --study)")
        return read_study(optuna.load_study(study_name=name, storage=backend), path)


def read_study(study: optuna.Study, path: Path) -> StudyRecord:
    """Everything an open study holds. Raises ``UserFileError`` as ``read_trials``."""
    attributes = study.user_attrs
    head = _checked(attributes.get(STUDY), f"study {study.study_name}", path)
    try:
        baseline = attributes.get(BASELINE)
        if not all(isinstance(head[key], dict) for key in ("identity", "facts", "settings")):
            raise TypeError("identity, facts and settings are mappings")  # noqa: TRY301 - reported as the others
        return StudyRecord(
            name=study.study_name,
            storage=str(path),
            identity=head["identity"],
            facts=head["facts"],
            settings=head["settings"],
            baseline=None if baseline is None else BaselineRecord.from_dict(baseline),
            trials=tuple(read_trials(study, path)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(f"study {study.study_name}", path, error) from error


def read_trials(study: optuna.Study, path: Path) -> list[TrialRecord]:
    """The finished trials of an open study, in order: the only way results leave a storage.

    Raises:
        UserFileError: A record is damaged, was written by a newer routing_lab, or not by routing_lab at all.
    """
    records = []
    for trial in study.get_trials(deepcopy=False):
        if trial.state.is_finished():
            data = _checked(trial.user_attrs.get(TRIAL), f"trial {trial.number}", path)
            try:
                records.append(TrialRecord.from_dict(trial.number, data))
            except (KeyError, TypeError, ValueError) as error:
                raise _damaged(f"trial {trial.number}", path, error) from error
    return records


def _checked(data: Any, where: str, path: Path) -> dict[str, Any]:  # noqa: ANN401 - whatever the storage holds
    if not isinstance(data, dict):
        raise UserFileError(
            str(path), [Problem(where, "was not written by routing_lab", "choose another study with --study")]
        )
    if data.get("schema") != SCHEMA:
        what = f"has schema {data.get('schema')!r}, and this version of routing_lab reads {SCHEMA}"
        raise UserFileError(str(path), [Problem(where, what, "use the version that wrote it, or a new study")])
    return data


def _damaged(where: str, path: Path, error: Exception) -> UserFileError:
    return UserFileError(
        str(path), [Problem(where, f"its record is damaged ({type(error).__name__}: {error})", "use a new study")]
    )


# ---------------------------------------------------------------------------------------------------------------------
# Failures


@contextmanager
def reporting_storage_errors(path: Path) -> Iterator[None]:
    """Turn what SQLite, SQLAlchemy and Optuna raise about the file into ``UserFileError``.

    Of a value that they do not expect (an unknown state, half a JSON text) they raise whatever the line that stumbled
    over it raises, so that an exception of theirs is told from one of ours by where it comes from.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AssertionError, AttributeError) as error:
        if not _is_of_the_storage(error):
            raise
        first = (str(error).splitlines() or [""])[0]
        what = f"is damaged ({type(error).__name__}: {first:.200})"
        raise UserFileError(str(path), [Problem("", what, _DAMAGED)]) from error
    except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError, sqlite3.Error) as error:
        raise UserFileError(str(path), [_sqlite_problem(_innermost(error))]) from error


def _is_of_the_storage(error: BaseException) -> bool:
    """Whether the code that failed reads the storage: the innermost frame that is ours, Optuna's or SQLAlchemy's."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    known = [name for name in modules if name.partition(".")[0] in {"routing_lab", "optuna", "sqlalchemy"}]
    return bool(known) and known[-1].startswith(("optuna.storages", "optuna.distributions", "sqlalchemy"))


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(getattr(error, "orig", None) or error)


def _sqlite_problem(said: str) -> Problem:
    for sign, what, remedy in _SQLITE_PROBLEMS:
        if sign in said.lower():
            return Problem("", what, remedy)
    return Problem("", f"cannot be used: {said}", "take another file with --storage")


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna reports new studies on stderr; the command that runs the study reports what matters."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
