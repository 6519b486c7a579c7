"""Schedules under several placements side by side: what a schedule gains depends on where the weights live.

Every study is a column of its own with its placement in its head, and rows stand in the order of their experts: speeds
of different placements are never ranked against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from routing_lab.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from routing_lab.search.records import StudyRecord, TrialRecord

__all__ = ["JointRow", "joint_fields", "joint_rows", "joint_table"]

_SAME: Final = ("model", "baseline", "probes")
"""What studies must share, so that one schedule means the same in all of them."""
_FEWEST: Final = 2


@dataclass(frozen=True, slots=True)
class JointRow:
    """One schedule and its trial in each study, ``None`` where a study did not evaluate it."""

    key: str
    total_experts: int
    trials: tuple[TrialRecord | None, ...]


def joint_rows(studies: Sequence[StudyRecord]) -> list[JointRow]:
    """Every schedule that some study accepted: those in most studies first, then those with most experts.

    Raises ``UsageError`` for fewer than two studies, and for studies of another model or other probes.
    """
    if len(studies) < _FEWEST:
        raise UsageError("a joint view needs at least two studies")
    first = studies[0]
    for study in studies[1:]:
        different = [label for label in _SAME if study.identity.get(label) != first.identity.get(label)]
        if different:
            what = ", another ".join(different)
            raise UsageError(f"studies {first.name} and {study.name} cannot stand side by side: another {what}")
    by_study = [{trial.key: trial for trial in study.evaluated} for study in studies]
    accepted = {trial.key: trial for trials in by_study for trial in trials.values() if trial.accepted}
    rows = [
        JointRow(key, trial.total_experts, tuple(trials.get(key) for trials in by_study))
        for key, trial in accepted.items()
    ]
    return sorted(rows, key=lambda row: (row.trials.count(None), -row.total_experts, row.key))


def joint_table(studies: Sequence[StudyRecord], *, rows: int = 8) -> Table:
    """At most ``rows`` schedules. Raises as ``joint_rows``."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text("Screening, not validated: each column is a placement with a baseline of its own"),
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    table.add_column("experts in blocks", overflow="fold")
    table.add_column("experts", justify="right")
    for study in studies:
        table.add_column(Text(f"{study.name}: {study.identity.get('placement', 'unknown placement')}"), overflow="fold")
    for row in joint_rows(studies)[:rows]:
        table.add_row(Text(row.key), str(row.total_experts), *(Text(_cell(trial)) for trial in row.trials))
    return table


def joint_fields(studies: Sequence[StudyRecord]) -> dict[str, Any]:
    """The joint view as JSON can hold it. Raises as ``joint_rows``."""
    return {
        "stage": "screening",
        "studies": [{"study": study.name, "placement": study.identity.get("placement")} for study in studies],
        "schedules": [
            {
                "experts_used": row.key,
                "total_experts": row.total_experts,
                "by_study": [
                    None
                    if trial is None
                    else {"speed": trial.speed and trial.speed.to_dict(), "verdict": trial.verdict.result.value}
                    for trial in row.trials
                ],
            }
            for row in joint_rows(studies)
        ],
    }


def _cell(trial: TrialRecord | None) -> str:
    if trial is None:
        return "-"
    verdict = trial.verdict.result.value
    if trial.speed is None:
        return verdict
    return f"{trial.speed.ratio:.3f} [{trial.speed.low:.3f}, {trial.speed.high:.3f}] {verdict}"
