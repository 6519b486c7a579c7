"""The certificate: what exactly was validated, in one file that everything leaving the lab starts from.

It is YAML that people can read, and it ends with a digest of its own content. The digest is there so that a slip
of the hand is noticed (a count changed in an editor, a block lost in a merge). It is no signature: whoever wants to
forge a certificate can compute another digest.
"""

from __future__ import annotations

import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from routing_lab.answers import Status
from routing_lab.errors import Problem, UserFileError
from routing_lab.gate import AcceptanceRule, PairedDifference, Policy, Verdict, decide, paired_difference
from routing_lab.measure import SpeedRatio
from routing_lab.model import ModelFacts
from routing_lab.overrides import parse_experts
from routing_lab.placement import Placement
from routing_lab.probes import Outcome
from routing_lab.runtime.base import RuntimeBuild
from routing_lab.schedule import Schedule
from routing_lab.yamlfile import parse_yaml, read_text, render_yaml

__all__ = [
    "SCHEMA",
    "Answer",
    "Certificate",
    "CertifiedModel",
    "CertifiedOptions",
    "CertifiedProbes",
    "CertifiedSchedule",
    "EvenSpread",
    "SpeedRule",
]

SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class CertifiedModel:
    """Which model: ``digest`` is over the bytes of all its files; ``experts_used`` are its own counts (a key)."""

    file: str
    name: str
    architecture: str
    digest: str
    blocks: int
    experts: int
    experts_used: str


@dataclass(frozen=True, slots=True)
class CertifiedOptions:
    """The options under which the answers were given; ``threads`` of ``None`` means all cores."""

    threads: int | None
    context_tokens: int
    batch_tokens: int
    kv_type: str


@dataclass(frozen=True, slots=True)
class CertifiedSchedule:
    """A schedule with every routed block: ``experts_used`` is its key, ``0-2:6,3-5:4``."""

    name: str
    experts_used: str

    def __post_init__(self) -> None:
        parse_experts(self.experts_used)

    @property
    def schedule(self) -> Schedule:
        """As a value of its own kind."""
        return Schedule.from_counts(self.name, parse_experts(self.experts_used))


@dataclass(frozen=True, slots=True)
class CertifiedProbes:
    """Which questions were asked."""

    name: str
    digest: str
    gate: int
    holdout: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What one probe gave; of ``correct`` answers nothing more is kept than that they were."""

    probe: str
    status: Status
    reason: str | None = None
    extracted: str | None = None

    @classmethod
    def of(cls, outcome: Outcome) -> Answer:
        """The part of an outcome that a certificate keeps."""
        if outcome.correct:
            return cls(outcome.probe, outcome.status)
        return cls(outcome.probe, outcome.status, outcome.reason, outcome.extracted)


@dataclass(frozen=True, slots=True)
class SpeedRule:
    """When a validated schedule may be called faster: the lower end of its speed ratio's interval is above this."""

    min_ratio_low: float = 1.0


@dataclass(frozen=True, slots=True)
class EvenSpread:
    """The schedule that spreads the same total evenly, measured and questioned in the same acceptance run.

    ``speed`` is its own ratio to the baseline, ``certified_over_even`` the certified schedule's ratio to it.
    ``holdout`` pairs it with the baseline. ``accepted`` says whether it would have passed the same rules.
    """

    schedule: CertifiedSchedule
    speed: SpeedRatio
    certified_over_even: SpeedRatio
    gate: Verdict
    holdout: PairedDifference
    accepted: bool


@dataclass(frozen=True, slots=True)
class Certificate:
    """A validated schedule and everything its validation rests on.

    ``speed`` compares with the baseline. The four lists hold one answer per probe: candidate on gate and
    holdout, baseline on both. ``even_spread`` is ``None`` where the schedule spreads its total evenly itself.
    """

    created: str
    model: CertifiedModel
    runtime: RuntimeBuild
    options: CertifiedOptions
    placement: Placement
    schedule: CertifiedSchedule
    probes: CertifiedProbes
    acceptance_rule: AcceptanceRule
    speed_rule: SpeedRule
    speed: SpeedRatio
    gate: Verdict
    holdout: PairedDifference
    holdout_failure_bound_95: float
    even_spread: EvenSpread | None
    gate_answers: tuple[Answer, ...]
    holdout_answers: tuple[Answer, ...]
    baseline_gate_answers: tuple[Answer, ...]
    baseline_holdout_answers: tuple[Answer, ...]

    @property
    def digest(self) -> str:
        """``sha256:`` and the digest of the content in a canonical form."""
        return _content_digest(self._content())

    def covers(self, schedule: Schedule, facts: ModelFacts, model_digest: str) -> bool:
        """Whether this is about exactly this schedule on exactly this model.

        Raises:
            UserFileError: The schedule does not fit the model.
        """
        return self.model.digest == model_digest and self.schedule.experts_used == schedule.key(facts)

    def to_yaml(self) -> str:
        """The certificate as a file."""
        data = self._content() | {"digest": self.digest}
        return render_yaml(data, flow={name for name in data if name.endswith("_answers")})

    def save(self, path: Path) -> None:
        """Write ``to_yaml`` to ``path``; its folder is made where it is missing.

        Raises:
            UserFileError: The file cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.to_yaml(), encoding="utf-8")
        except OSError as error:
            raise UserFileError(str(path), [Problem("", f"cannot be written: {error.strerror or error}")]) from None

    @classmethod
    def load(cls, path: Path) -> Certificate:
        """Read a certificate file. Raises as ``from_yaml``."""
        return cls.from_yaml(read_text(path), str(path))

    @classmethod
    def from_yaml(cls, text: str, file: str = "certificate") -> Certificate:
        """Parse a certificate; ``file`` names it in messages.

        Raises:
            UserFileError: It is no certificate, of another schema, changed after it was written, or contradicts
                itself; every problem is listed.
        """
        data = parse_yaml(text, file)
        if not isinstance(data, dict) or "certificate" not in data:
            raise UserFileError(file, [Problem("", "is no certificate", "validate writes them")])
        if data["certificate"] != SCHEMA:
            what = f"is schema {data['certificate']!r}, and this version of routing_lab reads {SCHEMA}"
            raise UserFileError(file, [Problem("certificate", what, "use the version that wrote it")])
        problems: list[Problem] = []
        written = data.pop("digest", None)
        if written != _content_digest(data):
            remedy = "validate again; a certificate is not edited by hand"
            problems.append(Problem("digest", "does not belong to the content: the file was changed", remedy))
        content = {name: value for name, value in data.items() if name != "certificate"}
        certificate = _read(cls, content, "", problems)
        if not problems:
            problems += certificate._contradictions()  # noqa: SLF001 - of this class
        if problems:
            raise UserFileError(file, problems)
        return typing.cast("Certificate", certificate)

    def _content(self) -> dict[str, Any]:
        plain: dict[str, Any] = _plain(self)
        return {"certificate": SCHEMA, **plain}

    def _contradictions(self) -> list[Problem]:
        """Conclusions that do not follow from the answers and rates in the same file."""
        problems = []
        gate, holdout = _outcomes(self.gate_answers), _outcomes(self.holdout_answers)
        if not _agree(decide(gate, self.probes.gate, Policy()), self.gate):
            problems.append(Problem("gate", "does not follow from gate_answers"))
        if not _agree(paired_difference(_outcomes(self.baseline_holdout_answers), holdout), self.holdout):
            problems.append(Problem("holdout", "does not follow from holdout_answers"))
        speed = SpeedRatio.from_rates(self.speed.candidate_rates, self.speed.baseline_rates, self.speed.confidence)
        if not _agree(speed, self.speed):
            problems.append(Problem("speed", "does not follow from its rates"))
        return problems


def now() -> str:
    """The time for ``created``: UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _agree(computed: Any, written: Any) -> bool:  # noqa: ANN401 - parts of the certificate
    """Equal up to the last digits of floats: another machine's logarithm may round differently."""
    if isinstance(computed, float):
        return math.isclose(computed, written, rel_tol=1e-9, abs_tol=1e-12)
    if is_dataclass(computed):
        return all(_agree(getattr(computed, field.name), getattr(written, field.name)) for field in fields(computed))
    if isinstance(computed, tuple):
        return len(computed) == len(written) and all(map(_agree, computed, written))
    return bool(computed == written)


def _outcomes(answers: tuple[Answer, ...]) -> list[Outcome]:
    return [
        Outcome(
            probe=answer.probe,
            status=answer.status,
            reason=answer.reason,
            extracted=answer.extracted,
            text="",
            prompt_tokens=0,
            tokens=0,
            seconds=0.0,
            llama_seconds=0.0,
        )
        for answer in answers
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Values to plain data and back. The certificate is made of frozen dataclasses, so their fields are the format.


def _content_digest(content: Mapping[Any, Any]) -> str:
    try:
        canonical = json.dumps(content, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    except TypeError:  # keys of different kinds: nothing that we wrote
        return "none"
    return "sha256:" + hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _plain(value: Any) -> Any:  # noqa: ANN401 - any field of the certificate
    """What YAML can hold. Fields that have their default value of ``None`` are left out."""
    if is_dataclass(value):
        named = ((field, getattr(value, field.name)) for field in fields(value))
        return {field.name: _plain(v) for field, v in named if not (v is None and field.default is None)}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _read(kind: Any, data: Any, where: str, problems: list[Problem]) -> Any:  # noqa: ANN401 - any field of the certificate
    """Inverse of ``_plain`` for a field of type ``kind``; what does not fit is noted, and ``None`` stands in for it."""
    if typing.get_origin(kind) in {types.UnionType, typing.Union}:
        (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
        return None if data is None else _read(kind, data, where, problems)
    if is_dataclass(kind):
        return _read_dataclass(kind, data, where, problems)
    if typing.get_origin(kind) is tuple:
        return _read_tuple(typing.get_args(kind)[0], data, where, problems)
    value = _scalar(kind, data)
    if value is None:
        wanted = f"one of {', '.join(kind)}" if issubclass(kind, StrEnum) else f"of type {kind.__name__}"
        problems.append(Problem(where, f"is {data!r}, not {wanted}"))
    return value


def _scalar(kind: type, data: Any) -> Any:  # noqa: ANN401 - as _read
    """``data`` as a value of ``kind``; ``None`` where it is none."""
    if issubclass(kind, StrEnum):
        return kind(data) if data in list(kind) else None
    if kind is float and type(data) in {int, float} and math.isfinite(data):
        return float(data)
    # Not isinstance: a bool is an int to Python, and never to us.
    return data if type(data) is kind and kind is not float else None


def _read_tuple(item: Any, data: Any, where: str, problems: list[Problem]) -> tuple[Any, ...]:  # noqa: ANN401 - as _read
    if isinstance(data, list):
        return tuple(_read(item, value, f"{where}[{index}]", problems) for index, value in enumerate(data))
    problems.append(Problem(where, "is no list"))
    return ()


def _read_dataclass(kind: Any, data: Any, where: str, problems: list[Problem]) -> Any:  # noqa: ANN401 - as _read
    if not isinstance(data, dict):
        problems.append(Problem(where, "is no mapping of keys to values"))
        return None
    before = len(problems)
    types_ = typing.get_type_hints(kind)
    values = {}
    for field in fields(kind):
        path = f"{where}.{field.name}" if where else field.name
        if field.name in data:
            values[field.name] = _read(types_[field.name], data[field.name], path, problems)
        elif field.default is MISSING:
            problems.append(Problem(path, "is missing"))
    known = {field.name for field in fields(kind)}
    problems += [
        Problem(f"{where}.{key}" if where else str(key), "is no key of this format") for key in data if key not in known
    ]
    if len(problems) > before:
        return None
    try:
        return kind(**values)
    except ValueError as error:
        problems.append(Problem(where, str(error)))
        return None
