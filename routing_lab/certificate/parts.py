"""The parts of a certificate, and which values each of their fields may have."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from routing_lab.answers import Status
from routing_lab.gate import AcceptanceRule, PairedDifference, Verdict
from routing_lab.measure import SpeedRatio
from routing_lab.model import MAX_BLOCKS
from routing_lab.overrides import parse_experts
from routing_lab.placement import MAX_GPU_LAYERS, Placement
from routing_lab.probes import Outcome
from routing_lab.runtime.base import RuntimeOptions
from routing_lab.schedule import Schedule

__all__ = [
    "LIMITS",
    "Answer",
    "CertifiedModel",
    "CertifiedOptions",
    "CertifiedProbes",
    "CertifiedSchedule",
    "EvenSpread",
    "Limit",
    "SpeedRule",
    "date_limit",
]


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
    """The options under which the answers were given.

    ``threads`` of ``None`` means all cores, ``rpc_servers`` of ``None`` that no other machine lent a device.
    """

    threads: int | None
    context_tokens: int
    batch_tokens: int
    kv_type: str
    rpc_servers: tuple[str, ...] | None = None


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


# ---------------------------------------------------------------------------------------------------------------------
# What a field may hold

Limit = Callable[[Any], str]
"""What is wrong with a value of the right type (of a list: with one of its values); empty when nothing is."""

MOST: Final = (1 << 31) - 1
"""llama.cpp counts tokens and threads in 32 bits."""

_DIGEST: Final = re.compile("sha256:[0-9a-f]{64}")


def _within(least: float, most: float) -> Limit:
    return lambda value: "" if least <= value <= most else f"is {value}, not within {least:g} and {most:g}"


def _digest_limit(value: str) -> str:
    return "" if _DIGEST.fullmatch(value) else f"is {value!r:.80}, not sha256: and 64 hexadecimal digits"


def date_limit(value: str) -> str:
    """The ``Limit`` of a time in UTC."""
    try:
        datetime.strptime(value, "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        return f"is {value!r:.80}, not a time such as 2026-11-30T08:00:00Z"
    return ""


def _name_limit(value: str) -> str:
    try:
        Schedule(value, ())
    except ValueError as error:
        return str(error)
    return ""


def _counts_limit(value: str) -> str:
    try:
        return "" if parse_experts(value) else "names no block"
    except ValueError as error:
        return str(error)


def _words_limit(words: tuple[str, ...]) -> Limit:
    return lambda value: "" if value in words else f"is {value!r:.80}, not one of {', '.join(words)}"


def _endpoint_limit(value: str) -> str:
    return "" if re.fullmatch(r"[^\s,]+:\d{1,5}", value) else f"is {value!r:.80}, not HOST:PORT"


def _share_limit(value: float) -> str:
    return "" if 0 < value < 1 else f"is {value}, not between 0 and 1"


_RATE: Final = _within(1e-6, 1e9)

LIMITS: Final[Mapping[tuple[type, str], Limit]] = {
    (CertifiedModel, "digest"): _digest_limit,
    (CertifiedModel, "blocks"): _within(1, MAX_BLOCKS),
    (CertifiedModel, "experts"): _within(1, MOST),
    (CertifiedModel, "experts_used"): _counts_limit,
    (CertifiedOptions, "threads"): _within(1, MOST),
    (CertifiedOptions, "context_tokens"): _within(1, MOST),
    (CertifiedOptions, "batch_tokens"): _within(1, MOST),
    (CertifiedOptions, "kv_type"): _words_limit(typing.get_args(typing.get_type_hints(RuntimeOptions)["kv_type"])),
    (CertifiedOptions, "rpc_servers"): _endpoint_limit,
    (CertifiedSchedule, "name"): _name_limit,
    (CertifiedSchedule, "experts_used"): _counts_limit,
    (CertifiedProbes, "digest"): _digest_limit,
    (CertifiedProbes, "gate"): _within(1, MOST),
    (CertifiedProbes, "holdout"): _within(1, MOST),
    (Placement, "gpu_layers"): _within(0, MAX_GPU_LAYERS),
    (Placement, "host_experts"): _within(0, MAX_BLOCKS - 1),
    (AcceptanceRule, "margin"): lambda value: "" if 0 <= value < 1 else f"is {value}, not at least 0 and below 1",
    (SpeedRule, "min_ratio_low"): _within(0, 1e6),
    (SpeedRatio, "confidence"): _share_limit,
    (SpeedRatio, "candidate_rates"): _RATE,
    (SpeedRatio, "baseline_rates"): _RATE,
    (PairedDifference, "confidence"): _share_limit,
}
"""By type and field. What is computed from other fields needs no limit: it has to agree with them."""
