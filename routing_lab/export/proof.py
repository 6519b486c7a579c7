"""Starts an exported command exactly as it was printed, and finds out whether it does what it promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routing_lab.answers import Judge
from routing_lab.errors import NothingAcceptedError, UsageError
from routing_lab.measure import MeasureSettings, SpeedRatio, measure_ratio
from routing_lab.model import ModelFacts
from routing_lab.overrides import ServerCommand
from routing_lab.probes import Outcome, ProbeSet, run_probes
from routing_lab.runtime.base import RuntimeBuild, RuntimeOptions
from routing_lab.runtime.server import ServerRuntime
from routing_lab.schedule import Schedule, format_counts

__all__ = ["Proof", "prove"]

_CONTEXT = "--ctx-size"
_SETTINGS = MeasureSettings(tokens=64, rounds=6)


@dataclass(frozen=True, slots=True)
class Proof:
    """What one exported server did: the counts read back, one probe's outcome, and its speed beside the baseline's.

    ``answer`` comes from the server as its command made it; for ``speed`` the same server was then switched to and fro.
    """

    build: RuntimeBuild
    port: int
    experts_used: str
    answer: Outcome
    speed: SpeedRatio

    def require_answer(self) -> None:
        """Raise ``NothingAcceptedError`` where the probe was not answered correctly."""
        if not self.answer.correct:
            got = f" ({self.answer.extracted})" if self.answer.extracted else ""
            raise NothingAcceptedError(
                f"the server runs the schedule, but probe {self.answer.probe} got {self.answer.status}{got}"
            )

    def lines(self) -> list[str]:
        """For people, a line for each finding."""
        speed = self.speed
        return [
            f"ran on port {self.port}: {self.build.name} {self.build.version}",
            f"attested: {self.experts_used}",
            f"probe {self.answer.probe}: {self.answer.status}",
            f"speed ratio {speed.ratio:.3f} [{speed.low:.3f}, {speed.high:.3f}] to the model's own counts",
        ]

    def to_dict(self) -> dict[str, Any]:
        """The proof as JSON can hold it."""
        return {
            "build": self.build,
            "port": self.port,
            "experts_used": self.experts_used,
            "probe": self.answer.probe,
            "status": self.answer.status,
            "speed": self.speed.to_dict(),
        }


def prove(
    command: ServerCommand,
    schedule: Schedule,
    facts: ModelFacts,
    probe_set: ProbeSet,
    *,
    binary: Path | None = None,
    settings: MeasureSettings | None = None,
    on_progress: Callable[[str], None] = lambda _doing: None,
) -> Proof:
    """Start ``command``, read its counts back, ask the first gate probe, measure its speed ratio, and end it.

    The program is ``binary`` (see ``find_server``); arguments and variables are those of the command, to which only the
    ways to watch and switch the server are added.

    Raises:
        AttestationError: The server consults other counts than the schedule.
        RuntimeUnsupportedError: There is no fit server, it refuses its arguments, or the port is taken.
        RuntimeFailureError: It died.
        UsageError: The probe set has no gate probe.
    """
    gate = probe_set.split("gate")
    if not gate:
        raise UsageError(f"probe set {probe_set.name} has no gate probe to ask")
    options = RuntimeOptions(context_tokens=int(command.value(_CONTEXT) or RuntimeOptions().context_tokens))
    on_progress("starting the exported command")
    with ServerRuntime(facts.files[0], options, binary=binary, command=command) as server, Judge() as judge:
        attestation = server.attest_as_started(schedule)
        on_progress(f"asking probe {gate[0].id}")
        (answer,) = run_probes(server, probe_set, gate[:1], judge)
        on_progress("measuring its speed")
        speed = measure_ratio(server, schedule, Schedule.baseline(facts), settings or _SETTINGS)
        return Proof(server.build, command.port, format_counts(attestation.selected), answer, speed)
