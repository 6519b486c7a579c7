"""What a study may spend and how it decides: plain data, so that it can be stored beside the results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from routing_lab.errors import UsageError
from routing_lab.gate import Policy
from routing_lab.measure import MeasureSettings

__all__ = ["SAMPLER_NAMES", "STARTS", "SamplerName", "Start", "StudySettings"]

SamplerName = Literal["schedule", "tpe", "gp", "nsga2", "random"]
SAMPLER_NAMES: tuple[SamplerName, ...] = get_args(SamplerName)

Start = Literal["auto", "sensitivity", "map", "uniform", "none"]
STARTS: tuple[Start, ...] = get_args(Start)

Order = Literal["auto", "speed", "gate"]


@dataclass(frozen=True, slots=True)
class StudySettings:
    """Budget and rules of a study.

    ``trials`` counts evaluated schedules of the whole study, those of earlier sessions included, so that the same call
    continues an interrupted study to the same end (``None``: as many as time and space allow). ``hours`` bounds this
    session and is checked between trials.

    ``measure`` is the screening measurement of each trial. ``stop_after_failures`` ends a gate run at that many failed
    probes (``None``: never). ``runners_up`` is how many of the fastest accepted schedules the acceptance run may want:
    a schedule that is surely slower than all of them skips the gate (``None``: no schedule skips it for that).
    ``order`` says what a trial begins with: ``speed``, the ``gate``, or (``auto``) whichever of the two has so far
    rejected more schedules for its time. ``verify`` of ``False`` decodes every answer instead of checking the
    baseline's as drafts.
    ``start`` says what comes before the sampler's own proposals: the ``sensitivity`` pass (every dimension cut alone as
    far as it goes and put through the gate, without a measurement; ``trials`` does not count these runs), the ``map``
    (the same with the whole gate, and where it fails with gentler cuts), the ``uniform`` schedules of the space,
    ``none``, or ``auto``: the sensitivity pass where drafts are checked and the space has one, else the uniform ones.
    ``most_runtime_errors`` trials that fail in a row end the study.

    Raises:
        UsageError: A number is out of range or the sampler unknown.
    """

    trials: int | None = 40
    hours: float | None = None
    seed: int = 0
    sampler: SamplerName = "schedule"
    measure: MeasureSettings = field(
        default_factory=lambda: MeasureSettings(rounds=6, most_rounds=18, half_width=0.015)
    )
    policy: Policy = field(default_factory=Policy)
    stop_after_failures: int | None = 1
    runners_up: int | None = 3
    most_runtime_errors: int = 5
    order: Order = "auto"
    verify: bool = True
    start: Start = "auto"

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLER_NAMES:
            raise UsageError(f"unknown sampler {self.sampler!r}: choose one of {', '.join(SAMPLER_NAMES)}")
        if self.order not in get_args(Order):
            raise UsageError(f"unknown order {self.order!r}: choose one of {', '.join(get_args(Order))}")
        if self.start not in STARTS:
            raise UsageError(f"unknown start {self.start!r}: choose one of {', '.join(STARTS)}")
        if self.start in {"sensitivity", "map"} and not self.verify:
            raise UsageError(
                f"the start {self.start} looks at how far drafts are kept to, and there are none where every answer is "
                "decoded (--plain): begin with uniform or none"
            )
        if self.hours is not None and not self.hours > 0:
            raise UsageError(f"hours must be positive, got {self.hours}")
        if not 0 <= self.seed < 2**31:
            raise UsageError(f"seed must be within 0..2147483647, got {self.seed}")
        for name in ("trials", "stop_after_failures", "runners_up", "most_runtime_errors"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be positive, got {value}")
