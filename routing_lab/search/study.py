"""Search a space: open or continue a study, see that it is the same question as before, and run a session of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import optuna
from optuna.storages import RDBStorage

from routing_lab.answers import Judge
from routing_lab.errors import InterruptedStudyError, UsageError
from routing_lab.gate import Policy
from routing_lab.model import model_digest
from routing_lab.probes import ProbeSet
from routing_lab.runtime.base import Runtime
from routing_lab.schedule import Schedule
from routing_lab.search.dimensions import Dimensions
from routing_lab.search.records import SCHEMA, StudyRecord, TrialRecord, candidates
from routing_lab.search.session import Progress, Session, Step, Stop
from routing_lab.search.settings import StudySettings
from routing_lab.search.storage import (
    BASELINE,
    STUDY,
    TRANSCRIPTS,
    TRIAL,
    OpenFile,
    check_study_name,
    open_storage,
    quiet_optuna,
    read_study,
    reporting_storage_errors,
    storage_path,
    study_lock,
)
from routing_lab.space import SearchSpace

__all__ = ["StudyResult", "refuse_another_question", "run_study"]

_NOT_THE_BASELINES: Final = {"policy", "search space"}
"""Parts of an identity on which neither the baseline's speed nor its answers depend."""


@dataclass(frozen=True, slots=True)
class StudyResult:
    """What a session leaves: the study as stored, why the session stopped, and how many schedules it evaluated."""

    study: StudyRecord
    stopped: Stop
    evaluated_now: int = 0

    @property
    def candidates(self) -> list[TrialRecord]:
        """Accepted trials, fastest first; empty when nothing passed."""
        return candidates(self.study)


def run_study(
    runtime: Runtime,
    probe_set: ProbeSet,
    space: SearchSpace,
    *,
    study: str,
    storage: Path | str,
    settings: StudySettings | None = None,
    judge: Judge | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_baseline: Step | None = None,
) -> StudyResult:
    """Search ``space`` for fast schedules that pass the gate; continue the study of that name where there is one.

    Args:
        runtime: The model; left open.
        probe_set: Its gate probes decide. The holdout is not touched.
        space: The schedules to choose from.
        study: Name of the study in the storage.
        storage: SQLite file, made where it is missing.
        settings: Budget and rules.
        judge: Compares answers; one of its own by default.
        on_progress: Called after the baseline and after each trial.
        on_baseline: Called while the baseline is asked and measured: what is done, and how much of how much.

    Raises:
        UsageError: The stored study is another question (all differences are named), another process runs it, or there
            is no gate probe.
        UserFileError: The storage is damaged, locked, full or not a storage; the space does not fit the model.
        NothingAcceptedError: The policy is ``all_correct`` and the baseline itself fails a gate probe.
        RuntimeFailureError: The model's process was lost during the baseline, or in too many trials in a row.
        RuntimeUnsupportedError: The runtime cannot set such schedules.
        InterruptedStudyError: Ctrl-C. What is finished is saved; the message says how to go on.
    """
    settings = settings or StudySettings()
    check_study_name(study)
    if not probe_set.split("gate"):
        raise UsageError(f"probe set {probe_set.name} has no gate probes, so nothing could be decided")
    path = storage_path(storage)
    dimensions = Dimensions(space, runtime.facts)
    identity = _identity(runtime, probe_set, space, settings.policy)
    own: AbstractContextManager[Judge] = nullcontext(judge) if judge else Judge()
    with study_lock(path, study), reporting_storage_errors(path), quiet_optuna(), own as judging:
        backend = open_storage(path, create=True)
        opened = _open_study(backend, path, study, identity, _described(runtime, settings))
        file = OpenFile(path, backend)

        def tell(now: Progress) -> None:
            file.require()
            if on_progress is not None:
                on_progress(now)

        session = Session(
            runtime=runtime,
            probe_set=probe_set,
            judge=judging,
            settings=settings,
            dimensions=dimensions,
            study=opened,
            path=path,
            on_baseline=on_baseline,
        )
        try:
            stopped = session.run(tell)
        except KeyboardInterrupt:
            raise InterruptedStudyError(
                f"interrupted; {session.saved} are saved. To go on, run the same command "
                f"again (routing-lab search --study {study} --storage {path} and the other options you gave)"
            ) from None
        return StudyResult(read_study(opened, path), stopped, session.evaluated_now)


def _identity(runtime: Runtime, probe_set: ProbeSet, space: SearchSpace, policy: Policy) -> dict[str, str]:
    """Everything that must be equal for two trials to be comparable, in words that a message can show."""
    facts, build, options = runtime.facts, runtime.build, runtime.options
    return {
        "model": f"{facts.name} ({model_digest(facts)})",
        "baseline": Schedule.baseline(facts).key(facts),
        "probes": f"{probe_set.name} ({probe_set.digest})",
        "search space": space.to_yaml(),
        "policy": policy.rule.value,
        "runtime": f"{build.name} {build.version} ({build.library_digest})",
        "placement": ", ".join([options.placement.describe(), *(f"devices of {rpc}" for rpc in options.rpc_servers)]),
        "options": (
            f"threads {options.threads or 'all'}, context {options.context_tokens}, "
            f"batch {options.batch_tokens}, kv {options.kv_type}"
        ),
    }


def _described(runtime: Runtime, settings: StudySettings) -> dict[str, object]:
    """What a report says about the study besides its results."""
    facts = runtime.facts
    return {
        "facts": {
            "name": facts.name,
            "architecture": facts.architecture,
            "blocks": facts.blocks,
            "experts": facts.experts,
            "experts_used": {str(block): count for block, count in facts.experts_used.items()},
        },
        "settings": asdict(settings),
    }


def _open_study(
    backend: RDBStorage, path: Path, name: str, identity: Mapping[str, str], described: Mapping[str, object]
) -> optuna.Study:
    """Create the study, or continue the one that is there if it asks the same question."""
    opened = optuna.create_study(storage=backend, study_name=name, direction="maximize", load_if_exists=True)
    # A process that was killed right after it created the study left it without trials and attributes.
    if opened.user_attrs or opened.get_trials(deepcopy=False):
        stored = read_study(opened, path)
        if dict(stored.identity) != dict(identity) and not _has_begun(opened):
            opened = _anew(backend, opened, stored, identity)
        else:
            refuse_another_question(stored, identity)
    opened.set_user_attr(STUDY, {"schema": SCHEMA, "identity": dict(identity), **described})
    return opened


def _has_begun(opened: optuna.Study) -> bool:
    """Whether a trial left anything: only then would results of another question stand beside it."""
    return any(TRIAL in trial.user_attrs for trial in opened.get_trials(deepcopy=False))


def _anew(backend: RDBStorage, opened: optuna.Study, stored: StudyRecord, identity: Mapping[str, str]) -> optuna.Study:
    """An empty study of the same name for another question; the baseline stays where it is the same one.

    Optuna forgets no attribute and no trial that waits, so that the study is made again.
    """
    different = {label for label, now in identity.items() if stored.identity.get(label) != now}
    kept = {BASELINE, TRANSCRIPTS} & opened.user_attrs.keys() if different <= _NOT_THE_BASELINES else set()
    attributes = {name: opened.user_attrs[name] for name in kept}
    optuna.delete_study(study_name=stored.name, storage=backend)
    made = optuna.create_study(storage=backend, study_name=stored.name, direction="maximize")
    for name, value in attributes.items():
        made.set_user_attr(name, value)
    return made


def refuse_another_question(stored: StudyRecord, identity: Mapping[str, str]) -> None:
    """Raise ``UsageError`` with every difference between the stored study and the one that was asked for.

    ``identity`` may be a part of one: what can be said before the model is loaded.
    """
    differences = [
        f"{label}: the study has {_line(stored.identity.get(label, 'none'))}, now it is {_line(now)}"
        for label, now in identity.items()
        if stored.identity.get(label) != now
    ]
    if differences:
        listed = "\n  ".join(differences)
        raise UsageError(
            f"study {stored.name} in {stored.storage} cannot go on, since its results would not be comparable:\n"
            f"  {listed}\nUse another name with --study, or restore what differs"
        )


def _line(value: str) -> str:
    """A value on one line of a message."""
    return "; ".join(value.split("\n")).strip("; ")
