from __future__ import annotations

import gc
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import optuna
import pytest
from fakelab import make_facts, make_probes, make_runtime, make_space

from routing_lab.errors import UsageError, UserFileError
from routing_lab.measure import MeasureSettings
from routing_lab.search import Progress, StudySettings, load_study, run_study, study_names
from routing_lab.search.storage import TRIAL, open_storage, reporting_storage_errors, storage_path, study_lock

SETTINGS = StudySettings(trials=3, measure=MeasureSettings(rounds=6, tokens=8), sampler="random", start="uniform")


def run(folder: Path, storage: Path, runtime: Any = None) -> None:
    given = runtime or make_runtime(make_facts(folder))
    run_study(given, make_probes(), make_space(), study="s", storage=storage, settings=SETTINGS)


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    path = tmp_path / "studies.db"
    run(tmp_path, path)
    return path


def test_processes_that_make_one_storage_at_the_same_moment_all_get_it(tmp_path: Path) -> None:
    for number in range(10):
        path = tmp_path / f"{number}.db"
        with ThreadPoolExecutor(8) as pool:
            opened = [pool.submit(open_storage, path, create=True) for _ in range(8)]
        assert all(future.result().get_all_studies() == [] for future in opened)


# --- a file that goes away -------------------------------------------------------------------------------------------


def remove(path: Path) -> None:
    for one in path.parent.glob(f"{path.name}*"):
        one.unlink()


def replace_it(path: Path) -> None:
    remove(path)
    path.write_text("somebody else's")


def remove_its_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


@pytest.mark.parametrize("harm", [remove, replace_it, remove_its_folder])
@pytest.mark.parametrize("at", [0, 2])
def test_a_storage_that_is_taken_away_while_a_study_runs_is_said_and_saved(
    tmp_path: Path, harm: Callable[[Path], None], at: int
) -> None:
    path = tmp_path / "runs" / "studies.db"
    runtime, seen = make_runtime(make_facts(tmp_path)), []

    def watch(now: Progress) -> None:
        seen.append(now.done)
        if now.done == at:
            harm(path)

    with pytest.raises(UserFileError, match="was removed or replaced while the study ran") as caught:
        run_study(runtime, make_probes(), make_space(), study="s", storage=path, settings=SETTINGS, on_progress=watch)
    rescued = path if harm is not replace_it else path.with_name("studies-rescued-1.db")
    assert str(rescued.name if harm is replace_it else "the same command goes on") in str(caught.value)
    assert len(load_study(rescued).trials) == at + 1
    assert harm is not replace_it or path.read_text() == "somebody else's"
    done = run_study(runtime, make_probes(), make_space(), study="s", storage=rescued, settings=SETTINGS)
    assert len(done.study.evaluated) == SETTINGS.trials


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_path_and_its_url_name_the_same_file() -> None:
    assert storage_path("sqlite:///runs/a.db") == storage_path("runs/a.db") == storage_path(Path("runs/a.db"))
    assert storage_path("sqlite:////tmp/a.db") == Path("/tmp/a.db")


@pytest.mark.parametrize(
    "name", ["postgresql://host/db", "mysql://x", "sqlite://", "sqlite:x", "", "a{b}.db", "a?mode=ro"]
)
def test_what_names_no_sqlite_file_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        storage_path(name)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "-x", "x" * 101, "a\n"])
def test_a_study_name_that_breaks_file_names_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="study name"):
        run_study(
            make_runtime(make_facts(tmp_path)), make_probes(), make_space(), study=name, storage=tmp_path / "a.db"
        )
    assert not (tmp_path / "a.db").exists()


# --- reading ---------------------------------------------------------------------------------------------------------


def test_the_only_study_needs_no_name(storage: Path) -> None:
    assert load_study(storage).name == "s"
    assert study_names(storage) == ["s"]


def test_an_unknown_study_is_refused_with_those_there_are(storage: Path) -> None:
    with pytest.raises(UsageError, match=r"no study t .* holds s .*--study"):
        load_study(storage, "t")


def test_reading_a_missing_storage_does_not_make_one(tmp_path: Path) -> None:
    with pytest.raises(UserFileError, match="no such storage"):
        load_study(tmp_path / "a.db")
    assert not list(tmp_path.iterdir())


def test_a_study_of_somebody_else_is_refused(storage: Path) -> None:
    optuna.create_study(storage=open_storage(storage, create=True), study_name="theirs")
    with pytest.raises(UserFileError, match="study theirs: was not written by routing_lab"):
        load_study(storage, "theirs")


def set_attribute(storage: Path, table: str, value: str) -> None:
    with closing(sqlite3.connect(storage)) as connection:
        connection.execute(f"UPDATE {table} SET value_json = ? WHERE key = ?", (value, TRIAL))  # noqa: S608 - our own words
        connection.commit()


@pytest.mark.parametrize(
    ("table", "where"), [("trial_user_attributes", "trial 0"), ("study_user_attributes", "study s")]
)
def test_a_newer_schema_is_refused_and_not_guessed_at(storage: Path, table: str, where: str) -> None:
    set_attribute(storage, table, json.dumps({"schema": 3}))
    with pytest.raises(UserFileError, match=f"{where}: has schema 3, and this version of routing_lab reads 2"):
        load_study(storage)


@pytest.mark.parametrize(
    ("table", "where"), [("trial_user_attributes", "trial 0"), ("study_user_attributes", "study s")]
)
def test_a_damaged_record_is_one_clear_error(storage: Path, table: str, where: str) -> None:
    set_attribute(storage, table, json.dumps({"schema": 2, "ending": "evaluated"}))
    with pytest.raises(UserFileError, match=f"{where}: its record is damaged"):
        load_study(storage)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder, and a storage with a finished study in it, all in one file."""
    folder = tmp_path_factory.mktemp("finished")
    run(folder, folder / "studies.db")
    gc.collect()  # Optuna closes its connections when they are collected
    with closing(sqlite3.connect(folder / "studies.db")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return folder, folder / "studies.db"


@pytest.mark.parametrize("value", [None, "garbage", "[1", 10**15])
@pytest.mark.parametrize(
    "column",
    [
        "trials.state",
        "trials.number",
        "study_directions.direction",
        "trial_values.value_type",
        "trial_values.objective",
        "study_user_attributes.value_json",
        "trial_user_attributes.value_json",
        "trial_params.distribution_json",
        "trial_params.param_value",
    ],
)
def test_a_value_that_optuna_stumbles_over_is_one_clear_error(
    finished: tuple[Path, Path], tmp_path: Path, column: str, value: object
) -> None:
    folder, intact = finished
    table, _, name = column.partition(".")
    path = tmp_path / "studies.db"
    for attempt in (load_study, lambda path: run(folder, path)):
        shutil.copy(intact, path)
        with closing(sqlite3.connect(path)) as connection, suppress(sqlite3.IntegrityError):
            connection.execute(f"UPDATE {table} SET {name} = ?", (value,))  # noqa: S608 - our own words
            connection.commit()
        with suppress(UserFileError, UsageError):
            attempt(path)


@pytest.mark.parametrize("state", ["PAUSED", "", "5"])
def test_an_unknown_state_of_a_trial_is_damage(finished: tuple[Path, Path], tmp_path: Path, state: str) -> None:
    path = Path(shutil.copy(finished[1], tmp_path / "studies.db"))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE trials SET state = ? WHERE number = 1", (state,))
        connection.commit()
    with pytest.raises(UserFileError, match=r"studies\.db: is damaged \(LookupError: .*restore it from a copy"):
        load_study(path)


def test_an_error_of_ours_is_not_called_damage(tmp_path: Path) -> None:
    with pytest.raises(KeyError), reporting_storage_errors(tmp_path / "a.db"):
        {}["a bug"]


# --- files that are no storage ---------------------------------------------------------------------------------------


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF and more")
    for attempt in (load_study, lambda path: run(tmp_path / "..", path)):
        with pytest.raises(UserFileError, match="no SQLite database"):
            attempt(path) if attempt is load_study else open_storage(path, create=True)
    assert path.read_bytes() == b"GGUF and more"


def test_a_database_of_another_program_gets_no_tables(tmp_path: Path) -> None:
    path = tmp_path / "photos.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE photos (id INTEGER)")
        connection.commit()
    for create in (True, False):
        with pytest.raises(UserFileError, match="no Optuna storage"):
            open_storage(path, create=create)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("photos",)]


def test_an_empty_file_becomes_a_storage(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.touch()
    run(tmp_path, path)
    assert len(load_study(path).trials) == 3


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "device"])
def test_what_is_no_file_is_refused_at_once_and_nothing_is_left_beside_it(nonfile: Any, kind: str) -> None:
    path = nonfile(kind)
    for attempt in (load_study, lambda path: run(path.parent, path)):
        with pytest.raises(UserFileError, match=f"{path}: is a "):
            attempt(path)
    assert list(path.parent.glob("*.lock")) == []


@pytest.mark.parametrize("name", [".", "/", ".."])
def test_a_folder_by_its_shortest_name_is_refused_too(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserFileError, match="is a folder"):
        run(tmp_path, Path(name))


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserFileError, match=r"file/studies\.db: cannot be locked: nothing can be written beside it"):
        run(tmp_path, tmp_path / "file" / "studies.db")


def test_a_truncated_database_is_one_clear_error(storage: Path, tmp_path: Path) -> None:
    os.truncate(storage, 8192)
    with pytest.raises(UserFileError, match=r"damaged|no Optuna storage"):
        run(tmp_path, storage)


# --- trouble on the way ----------------------------------------------------------------------------------------------


def test_a_storage_that_another_process_keeps_locked_is_one_clear_error(
    storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("routing_lab.search.storage.LOCK_WAIT_S", 0.1)
    with closing(sqlite3.connect(storage, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        with pytest.raises(UserFileError, match="locked by another process"):
            run(tmp_path, storage)
    run(tmp_path, storage)


def test_a_full_disk_in_mid_study_is_one_clear_error_and_loses_nothing_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite is told that the disk ends after so many pages; it then fails as on a full disk."""
    path = tmp_path / "a.db"
    run_pages = 35

    def small_disk(connection: sqlite3.Connection, _record: object) -> None:
        connection.execute(f"PRAGMA max_page_count={run_pages}")

    monkeypatch.setattr("routing_lab.search.storage._spare_the_disk", small_disk)
    settings = StudySettings(trials=30, measure=SETTINGS.measure, sampler="random", runners_up=None)
    given = make_runtime(make_facts(tmp_path)), make_probes(), make_space()
    with pytest.raises(UserFileError, match="disk is full"):
        run_study(*given, study="s", storage=path, settings=settings)
    saved = load_study(path).evaluated
    assert saved
    run_pages = 10_000
    assert load_study(path).evaluated[: len(saved)] == saved
    result = run_study(*given, study="s", storage=path, settings=settings)
    assert len(result.study.evaluated) == 30


# --- one process per study -------------------------------------------------------------------------------------------

HOLDER = """
import sys
from routing_lab.search.storage import study_lock
with study_lock({path!r}, "s"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_study_that_another_process_runs_is_refused_until_that_process_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(path=str(path))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UsageError, match="another process is running study s"):
        run(tmp_path, path)
    with study_lock(path, "other"):
        pass
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert holder.stdin is not None
    holder.stdin.close()
    run(tmp_path, path)
    assert len(load_study(path).trials) == 3


def test_a_finished_study_leaves_nothing_but_the_storage(storage: Path) -> None:
    assert [path.name for path in storage.parent.glob("*.lock")] == []


def test_a_study_that_an_error_ends_leaves_no_lock(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), study_lock(tmp_path / "a.db", "s"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_the_lock_is_held_by_one_and_free_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    for _ in range(2):
        with study_lock(path, "s"), pytest.raises(UsageError, match="another process"), study_lock(path, "s"):
            pass
