"""Results as pandas frames: one row per trial or per schedule, every column typed; pandas is imported on use.

A frame holds the results of one stage (screening, evaluation, published); the column ``stage`` says which, and nothing
here joins two of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from routing_lab.errors import UsageError
from routing_lab.schedule import Schedule, format_counts

if TYPE_CHECKING:
    import pandas as pd

    from routing_lab.evaluate import Evaluation, Row
    from routing_lab.search.records import StudyRecord, TrialRecord

__all__ = ["block_columns", "block_effects", "evaluation_frame", "frontier", "published_frame", "study_frame"]

# dtype of every fixed column of a study frame; Int64 and string hold missing values, float64 holds NaN for them.
_STUDY_DTYPES: Final[Mapping[str, str]] = {
    "trial": "int64",
    "stage": "category",
    "placement": "category",
    "ending": "category",
    "origin": "category",
    "schedule": "string",
    "total_experts": "int64",
    "speed_ratio": "float64",
    "ratio_low": "float64",
    "ratio_high": "float64",
    "tokens_per_s": "float64",
    "baseline_tokens_per_s": "float64",
    "verdict": "category",
    "accepted": "bool",
    "probes_correct": "int64",
    "probes_failed": "int64",
    "asked": "int64",
    "probes_total": "int64",
    "share_correct": "float64",
    "first_failure": "string",
    "first_failure_status": "string",
    "smallest_margin": "float64",
    "gate_skipped": "string",
    "speed_skipped": "string",
    "speed_seconds": "float64",
    "gate_seconds": "float64",
}
_BLOCK: Final = "block_"


def study_frame(study: StudyRecord) -> pd.DataFrame:
    """One row per finished trial, in the order they ran; screening results.

    Speeds are decode rates in tokens per second; ``speed_ratio`` is candidate over baseline, with the ends of its
    interval beside it. ``asked`` of the ``probes_total`` gate probes were asked, fewer where the run stopped at its
    first failures, and ``share_correct`` is ``probes_correct / asked``, NaN where the gate did not run. ``block_<n>``
    holds the experts consulted in block n, for every block that routes.
    """
    import pandas as pd

    placement = study.identity.get("placement")
    rows = [{"placement": placement, **_trial_row(trial)} for trial in study.trials]
    blocks = sorted({block for trial in study.trials for block, _ in trial.schedule.experts_used})
    dtypes = {**_STUDY_DTYPES, **{f"{_BLOCK}{block}": "int64" for block in blocks}}
    return pd.DataFrame(rows, columns=list(dtypes)).astype(dtypes)


def _trial_row(trial: TrialRecord) -> dict[str, Any]:
    verdict, speed = trial.verdict, trial.speed
    failed = next((outcome for outcome in trial.outcomes if not outcome.correct), None)
    return {
        "trial": trial.number,
        "stage": "screening",
        "ending": trial.ending.value,
        "origin": trial.origin,
        "schedule": trial.key,
        "total_experts": trial.total_experts,
        "speed_ratio": None if speed is None else speed.ratio,
        "ratio_low": None if speed is None else speed.low,
        "ratio_high": None if speed is None else speed.high,
        "tokens_per_s": None if speed is None else speed.candidate_tokens_per_s,
        "baseline_tokens_per_s": None if speed is None else speed.baseline_tokens_per_s,
        "verdict": verdict.result.value,
        "accepted": trial.accepted,
        "probes_correct": verdict.passed,
        "probes_failed": verdict.failed,
        "asked": verdict.run,
        "probes_total": verdict.total,
        "share_correct": verdict.passed / verdict.run if verdict.run else None,
        "first_failure": None if failed is None else failed.probe,
        "first_failure_status": None if failed is None else failed.status.value,
        "smallest_margin": trial.smallest_margin,
        "gate_skipped": trial.gate_skipped,
        "speed_skipped": trial.speed_skipped,
        "speed_seconds": trial.seconds.speed,
        "gate_seconds": trial.seconds.gate,
        **{f"{_BLOCK}{block}": count for block, count in trial.schedule.experts_used},
    }


def block_columns(frame: pd.DataFrame) -> list[str]:
    """The columns of a study frame that hold the counts of blocks, first block first."""
    return [str(column) for column in frame.columns if str(column).startswith(_BLOCK)]


def frontier(frame: pd.DataFrame) -> pd.DataFrame:
    """The trials that no other trial beats, slowest first: nothing is both as fast and as correct, and better in one.

    Compared are ``speed_ratio`` and ``share_correct``; trials without either are left out, and of equals one stays.

    Raises ``UsageError`` where the frame mixes placements: each has a baseline of its own, so their ratios do not rank.
    """
    placements = set(frame["placement"].dropna()) if "placement" in frame else set()
    if len(placements) > 1:
        mixed = "; ".join(sorted(placements))
        raise UsageError(f"speeds of different placements do not rank against each other: {mixed}")
    known = frame.dropna(subset=["speed_ratio", "share_correct"])
    fastest_first = known.sort_values(["speed_ratio", "share_correct"], ascending=False, kind="stable")
    # Going from fast to slow, a trial earns its place only with more correct answers than everything faster.
    best_so_far = fastest_first["share_correct"].cummax().shift(fill_value=-1.0)
    return fastest_first[fastest_first["share_correct"] > best_so_far].iloc[::-1].reset_index(drop=True)


def block_effects(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean ``share_correct`` of the trials that gave a block a count: one row per block, one column per count.

    NaN where no trial did. An association and no effect of the block alone: a sampler tries promising schedules more
    often, and the other blocks of a trial are cut as well.
    """
    import pandas as pd

    known = frame.dropna(subset=["share_correct"])
    means = {
        int(column.removeprefix(_BLOCK)): known.groupby(column)["share_correct"].mean()
        for column in block_columns(frame)
    }
    table = pd.DataFrame(means).sort_index().T
    return table.rename_axis(index="block", columns="experts")


# ---------------------------------------------------------------------------------------------------------------------
# Figure 1 and what stands beside it

_FIGURE_1_DTYPES: Final[Mapping[str, str]] = {
    "schedule": "string",
    "stage": "category",
    "experts_used": "string",
    "speed_ratio": "float64",
    "ratio_low": "float64",
    "ratio_high": "float64",
    "tokens_per_s": "float64",
    "status": "category",
    "probes_correct": "Int64",
    "probes_total": "Int64",
}


def evaluation_frame(evaluation: Evaluation) -> pd.DataFrame:
    """One row per schedule of an evaluation, the baseline first; the columns are those of ``published_frame``.

    ``status`` is ``correct``, the status of the first probe that is not, or ``undecided`` where no probe ran.
    """
    return _figure_1_frame(_evaluation_row(row) for row in (evaluation.baseline, *evaluation.rows))


def _evaluation_row(row: Row) -> dict[str, Any]:
    return {
        "schedule": row.schedule.name,
        "stage": "evaluation",
        "experts_used": row.key,
        "speed_ratio": None if row.speed is None else row.speed.ratio,
        "ratio_low": None if row.speed is None else row.speed.low,
        "ratio_high": None if row.speed is None else row.speed.high,
        "tokens_per_s": None if row.speed is None else row.speed.candidate_tokens_per_s,
        "status": "undecided" if row.status is None else row.status.value,
        "probes_correct": row.verdict.passed,
        "probes_total": row.verdict.total,
    }


def published_frame(schedules: Sequence[Schedule]) -> pd.DataFrame:
    """Published results in the columns of ``evaluation_frame``, from the ``source`` section of schedule files.

    The ratio is to the published rate of the schedule that leaves every listed block its model's own count; published
    rates come without intervals and counts of probes, so those columns are empty.

    Raises:
        UsageError: A schedule has no published rate or status, or none of them is the baseline.
    """
    bare = [schedule.name for schedule in schedules if _published(schedule) is None]
    if bare:
        raise UsageError(f"no published rate and status in {', '.join(bare)}: its source section should say both")
    own = [schedule for schedule in schedules if _is_baseline(schedule)]
    if not own:
        raise UsageError("none of the published schedules is the baseline (the model's own count in every block)")
    baseline_rate, _ = _published(own[0]) or (1.0, "")
    rows = []
    for schedule in schedules:
        rate, status = _published(schedule) or (0.0, "")
        rest = "" if schedule.others is None else f"all:{schedule.others}"
        rows.append(
            {
                "schedule": schedule.name,
                "stage": "published",
                "experts_used": ",".join(filter(None, [format_counts(dict(schedule.experts_used)), rest])),
                "speed_ratio": rate / baseline_rate,
                "tokens_per_s": rate,
                "status": status,
            }
        )
    return _figure_1_frame(rows)


def _published(schedule: Schedule) -> tuple[float, str] | None:
    source = schedule.source
    if source is None or not source.decode_tokens_per_s or source.status is None:
        return None
    return source.decode_tokens_per_s, source.status


def _is_baseline(schedule: Schedule) -> bool:
    own = None if schedule.model is None else schedule.model.experts_used
    counts = {*dict(schedule.experts_used).values(), schedule.others or own}
    return own is not None and counts == {own}


def _figure_1_frame(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(list(rows), columns=list(_FIGURE_1_DTYPES)).astype(dict(_FIGURE_1_DTYPES))
