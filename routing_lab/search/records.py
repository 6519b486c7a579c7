"""What a study knows, as values, and their form in the storage; nothing here needs Optuna.

A trial is written once, whole, when it ends: one attribute with one JSON object that carries the version of its schema.
So a record is either complete or absent, and a reader never has to guess.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from enum import StrEnum
from typing import Any, Final

from routing_lab.answers import Status
from routing_lab.gate import Result, Verdict
from routing_lab.measure import SpeedRatio
from routing_lab.overrides import parse_experts
from routing_lab.probes import Outcome
from routing_lab.probes.verify import Calibration
from routing_lab.schedule import Schedule

__all__ = ["SCHEMA", "SINGLE_CUT", "BaselineRecord", "Ending", "Seconds", "StudyRecord", "TrialRecord", "candidates"]

SCHEMA: Final = 2
"""Version of everything that is written to a storage."""

SINGLE_CUT: Final = "sensitivity"
"""Origin of a trial of the sensitivity pass: one dimension is cut alone, the gate asked and no speed measured."""

KEPT_OF_A_FAILURE: Final = 400
"""Characters of a completion that is not correct, from its end; correct ones are not kept."""


class Ending(StrEnum):
    """How a trial ended. Only ``evaluated`` ones are results; the schedules of the others may be evaluated again."""

    EVALUATED = "evaluated"
    RUNTIME_ERROR = "runtime_error"
    """The model's process was lost; nothing is known about the schedule."""
    DUPLICATE = "duplicate"
    """Another trial had evaluated this schedule by then (a study with one process never writes it)."""
    INTERRUPTED = "interrupted"
    """Ctrl-C, or an error that ended the study."""
    ABANDONED = "abandoned"
    """The process that ran it was killed; found by the session that resumed the study."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Wall time of the parts of a trial; 0 for a part that was skipped."""

    speed: float = 0.0
    gate: float = 0.0


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One schedule and what is known about it: a screening result, never a validated one.

    ``speed`` of ``None`` means that it was not measured, and ``speed_skipped`` says why that was not worth it.
    ``verdict`` is ``undecided`` where the gate did not run, and ``gate_skipped`` then says why that was not worth it.
    ``attested`` are the counts that were read back from the graph before the gate, written as ``schedule.key``.
    ``error`` is what the runtime said of its failure.
    """

    number: int
    ending: Ending
    schedule: Schedule
    key: str
    origin: str
    speed: SpeedRatio | None
    verdict: Verdict
    gate_skipped: str | None
    outcomes: tuple[Outcome, ...]
    attested: str | None
    seconds: Seconds
    error: str | None
    speed_skipped: str | None = None

    @property
    def accepted(self) -> bool:
        """Whether every part of the screening was done and passed."""
        return self.ending is Ending.EVALUATED and self.speed is not None and self.verdict.result is Result.PASS

    @property
    def is_single_cut(self) -> bool:
        """Whether it belongs to the sensitivity pass and not to the search itself."""
        return self.origin == SINGLE_CUT

    @property
    def smallest_margin(self) -> float | None:
        """The closest call along all completions, in logits; ``None`` where none was measured."""
        return min((one.smallest_margin for one in self.outcomes if one.smallest_margin is not None), default=None)

    def kept_share(self, baseline: BaselineRecord) -> float | None:
        """Share of the baseline's tokens that were said again, over the probes that were checked; ``None`` for none."""
        lengths = {outcome.probe: outcome.tokens for outcome in baseline.outcomes}
        checked = [outcome for outcome in self.outcomes if outcome.kept is not None and outcome.probe in lengths]
        total = sum(lengths[outcome.probe] for outcome in checked)
        return sum(outcome.kept or 0 for outcome in checked) / total if total else None

    @property
    def total_experts(self) -> int:
        """Experts consulted per token, summed over the blocks."""
        return sum(count for _, count in self.schedule.experts_used)

    def to_dict(self) -> dict[str, Any]:
        """The stored form; the number is the storage's own."""
        return {
            "schema": SCHEMA,
            "ending": self.ending.value,
            "name": self.schedule.name,
            "key": self.key,
            "origin": self.origin,
            "speed": None if self.speed is None else self.speed.to_dict(),
            "verdict": asdict(self.verdict),
            "gate_skipped": self.gate_skipped,
            "outcomes": [_outcome_row(outcome) for outcome in self.outcomes],
            "attested": self.attested,
            "seconds": asdict(self.seconds),
            "error": self.error,
            "speed_skipped": self.speed_skipped,
        }

    @classmethod
    def from_dict(cls, number: int, data: Mapping[str, Any]) -> TrialRecord:
        """Inverse of ``to_dict``. Raises ``KeyError``, ``TypeError`` or ``ValueError`` on a damaged record."""
        key = _typed("key", str, data["key"])
        record = cls(
            number=number,
            ending=Ending(data["ending"]),
            schedule=Schedule.from_counts(_typed("name", str, data["name"]), parse_experts(key)),
            key=key,
            origin=data["origin"],
            speed=None if data["speed"] is None else _speed(data["speed"]),
            verdict=_verdict(data["verdict"]),
            gate_skipped=data["gate_skipped"],
            outcomes=tuple(_outcome(row) for row in data["outcomes"]),
            attested=data["attested"],
            seconds=Seconds(**data["seconds"]),
            error=data["error"],
            speed_skipped=data["speed_skipped"],
        )
        _check_types(record)
        return record


@dataclass(frozen=True, slots=True)
class BaselineRecord:
    """The model's own schedule, measured before the first trial.

    ``speed`` is the baseline against itself: a ratio of 1 within its interval, whose width is this machine's noise.
    ``verdict`` is the gate's under ``all_correct``, whatever the study's policy, so that ``failures`` lists every probe
    that the model fails by itself. ``calibration`` says whether and how its completions serve as drafts (``None``: the
    study decodes every answer).
    """

    key: str
    speed: SpeedRatio
    verdict: Verdict
    outcomes: tuple[Outcome, ...]
    calibration: Calibration | None = None

    @property
    def tokens_per_s(self) -> float:
        """Median decode rate of the baseline."""
        return self.speed.baseline_tokens_per_s

    @property
    def failures(self) -> tuple[str, ...]:
        """Gate probes that the model fails with all its own experts."""
        return self.verdict.failures

    def to_dict(self) -> dict[str, Any]:
        """The stored form."""
        return {
            "schema": SCHEMA,
            "key": self.key,
            "speed": self.speed.to_dict(),
            "verdict": asdict(self.verdict),
            "outcomes": [_outcome_row(outcome) for outcome in self.outcomes],
            "calibration": None if self.calibration is None else self.calibration.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BaselineRecord:
        """Inverse of ``to_dict``. Raises ``KeyError``, ``TypeError`` or ``ValueError`` on a damaged record."""
        record = cls(
            key=data["key"],
            speed=_speed(data["speed"]),
            verdict=_verdict(data["verdict"]),
            outcomes=tuple(_outcome(row) for row in data["outcomes"]),
            calibration=None if data["calibration"] is None else Calibration(**data["calibration"]),
        )
        _check_types(record)
        return record


@dataclass(frozen=True, slots=True)
class StudyRecord:
    """A study as it stands in its storage.

    ``identity`` is everything that must be the same for two trials to be comparable, as labelled text. ``facts`` sums
    up the model, ``settings`` are those of the last session. ``baseline`` of ``None``: it was not measured yet.
    """

    name: str
    storage: str
    identity: Mapping[str, str]
    facts: Mapping[str, Any]
    settings: Mapping[str, Any]
    baseline: BaselineRecord | None
    trials: tuple[TrialRecord, ...]

    @property
    def evaluated(self) -> tuple[TrialRecord, ...]:
        """The trials that are results of the search."""
        return tuple(trial for trial in self.trials if trial.ending is Ending.EVALUATED and not trial.is_single_cut)

    @property
    def single_cuts(self) -> tuple[TrialRecord, ...]:
        """The results of the sensitivity pass."""
        return tuple(trial for trial in self.trials if trial.ending is Ending.EVALUATED and trial.is_single_cut)


def candidates(study: StudyRecord, top: int | None = None) -> list[TrialRecord]:
    """The accepted trials, fastest first, at most ``top`` of them."""
    accepted = [trial for trial in study.trials if trial.accepted]
    accepted.sort(key=lambda trial: (-_ratio(trial), trial.number))
    return accepted[:top]


def _ratio(trial: TrialRecord) -> float:
    assert trial.speed is not None, "an accepted trial was measured"  # noqa: S101
    return trial.speed.ratio


# ---------------------------------------------------------------------------------------------------------------------
# Stored forms of values that belong to other modules

_EXTRAS: Final = ("reason", "extracted", "text", "smallest_margin", "kept")


def _outcome_row(outcome: Outcome) -> list[Any]:
    """``[probe, status, prompt tokens, tokens, seconds, seconds in libllama, {the rest, where there is any}]``.

    A row and not an object: a study keeps thousands of them, and the names would be most of the bytes.
    """
    kept = "" if outcome.correct else outcome.text[-KEPT_OF_A_FAILURE:]
    extras = {"reason": outcome.reason, "text": kept, "smallest_margin": outcome.smallest_margin, "kept": outcome.kept}
    # Of a correct answer the extracted one equals the expected one.
    extras["extracted"] = None if outcome.correct else outcome.extracted
    row: list[Any] = [
        outcome.probe,
        outcome.status.value,
        outcome.prompt_tokens,
        outcome.tokens,
        round(outcome.seconds, 6),
        round(outcome.llama_seconds, 6),
    ]
    given = {name: value for name, value in extras.items() if value not in (None, "")}
    return [*row, given] if given else row


def _outcome(row: Sequence[Any]) -> Outcome:
    probe, status, prompt_tokens, tokens, seconds, llama_seconds, *rest = row
    extras = dict.fromkeys(_EXTRAS) | {"text": ""} | (rest[0] if rest else {})
    return Outcome(
        probe=probe,
        status=Status(status),
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        seconds=seconds,
        llama_seconds=llama_seconds,
        **extras,
    )


def _verdict(data: Mapping[str, Any]) -> Verdict:
    fields = dict(data)
    return Verdict(
        **fields
        | {
            "result": Result(fields["result"]),
            "failures": tuple(fields["failures"]),
            "excused": tuple(fields["excused"]),
        }
    )


def _speed(data: Mapping[str, Any]) -> SpeedRatio:
    for name in ("candidate_rates", "baseline_rates"):
        for rate in data[name]:
            _typed(name, float, rate)
    _typed("confidence", float, data["confidence"])
    if not 0 < data["confidence"] < 1:
        raise ValueError(f"confidence is {data['confidence']}")
    try:
        return SpeedRatio.from_dict(data)
    except OverflowError as error:
        raise ValueError(str(error)) from None


def _check_types(record: Any) -> None:  # noqa: ANN401 - a frozen value with fields of plain types
    """See that every field has its type, in the values it is made of too: JSON keeps whatever was written over it."""
    of: Any = type(record)
    for name, kind in _field_types(of).items():
        value = getattr(record, name)
        optional = typing.get_origin(kind) is types.UnionType
        if optional:
            kind = next(part for part in typing.get_args(kind) if part is not type(None))  # noqa: PLW2901
        if not (optional and value is None):
            items = value if typing.get_origin(kind) is tuple else (value,)
            item_kind = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind
            for item in items:
                _check_item(name, item_kind, item)


def _check_item(name: str, kind: Any, item: Any) -> None:  # noqa: ANN401 - as _check_types
    if kind not in {Schedule, SpeedRatio}:  # these check themselves
        _typed(name, kind, item)
        if is_dataclass(kind):
            _check_types(item)


def _typed(name: str, kind: Any, value: Any) -> Any:  # noqa: ANN401 - as _check_types
    """``value``. Raises ``TypeError`` where it is not of type ``kind``; whole numbers are floats too, bools are not."""
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise TypeError(f"{name} is {value!r:.60}")


_field_types = functools.cache(typing.get_type_hints)
