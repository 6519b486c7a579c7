"""The certificate: what exactly was validated, in one file that everything leaving the lab starts from.

It is YAML that people can read, and it ends with a digest of its own content. The digest is there so that a slip
of the hand is noticed (a count changed in an editor, a block lost in a merge). It is no signature: whoever wants to
forge a certificate can compute another digest.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from routing_lab.certificate.contradictions import contradictions
from routing_lab.certificate.parts import (
    LIMITS,
    Answer,
    CertifiedModel,
    CertifiedOptions,
    CertifiedProbes,
    CertifiedSchedule,
    EvenSpread,
    SpeedRule,
    date_limit,
)
from routing_lab.certificate.plain import content_digest, on_one_line, read_plain, to_plain
from routing_lab.errors import Problem, UserFileError
from routing_lab.gate import AcceptanceRule, PairedDifference, Verdict
from routing_lab.measure import SpeedRatio
from routing_lab.model import ModelFacts
from routing_lab.placement import Placement
from routing_lab.runtime.base import RuntimeBuild
from routing_lab.schedule import Schedule
from routing_lab.yamlfile import parse_yaml, read_text, render_yaml

__all__ = ["SCHEMA", "Certificate", "now"]

SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class Certificate:
    """A validated schedule and everything its validation rests on.

    ``speed`` compares with the baseline. The four lists hold one answer per probe: candidate on gate and
    holdout, baseline on both. ``even_spread`` is ``None`` where the schedule spreads its total evenly itself. In texts
    (a model's name, an answer) what does not print stands as an escape, so that each is one harmless line everywhere.
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

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, on_one_line(getattr(self, field.name)))

    @property
    def digest(self) -> str:
        """``sha256:`` and the digest of the content in a canonical form."""
        return content_digest(self._content())

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
        if data["certificate"] != SCHEMA or type(data["certificate"]) is not int:
            what = f"is schema {data['certificate']!r}, and this version of routing_lab reads {SCHEMA}"
            raise UserFileError(file, [Problem("certificate", what, "use the version that wrote it")])
        problems: list[Problem] = []
        written = data.pop("digest", None)
        if written != content_digest(data):
            remedy = "validate again; a certificate is not edited by hand"
            problems.append(Problem("digest", "does not belong to the content: the file was changed", remedy))
        content = {name: value for name, value in data.items() if name != "certificate"}
        read = read_plain(cls, content, {**LIMITS, (cls, "created"): date_limit}, problems)
        certificate = typing.cast("Certificate", read)
        if read is not None:
            problems += contradictions(certificate)
        if problems:
            raise UserFileError(file, problems)
        return certificate

    def _content(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_plain(self)
        return {"certificate": SCHEMA, **plain}


def now() -> str:
    """The time for ``created``: UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
