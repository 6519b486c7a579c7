"""Terminal tables: figure 1's table of an evaluation, a study's screening, an acceptance run; each fits 80 columns.

Screening and validated results never share a table, and every title says which of the two it shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from routing_lab.answers import Status
from routing_lab.gate import PairedDifference, Result, Verdict
from routing_lab.measure import Ended
from routing_lab.schedule import format_counts
from routing_lab.visible import visible

if TYPE_CHECKING:
    from routing_lab.certificate import Certificate, EvenSpread
    from routing_lab.evaluate import Evaluation
    from routing_lab.measure import SpeedRatio
    from routing_lab.probes import Outcome
    from routing_lab.search.records import StudyRecord, TrialRecord
    from routing_lab.validate import AcceptanceResult

__all__ = ["certificate_table", "evaluation_table", "screening_table", "validated_table"]

# The word says it; sign and colour say it again.
_SIGNS: Final = {
    Result.PASS.value: ("✓", "blue"),
    Result.FAIL.value: ("✗", "red"),
    Result.UNDECIDED.value: ("?", "magenta"),
    Status.CORRECT.value: ("✓", "blue"),
    Status.WRONG_ANSWER.value: ("✗", "red"),
    Status.NO_FINAL_ANSWER.value: ("…", "yellow"),
    Status.RUNTIME_ERROR.value: ("!", "magenta"),
}


def evaluation_table(evaluation: Evaluation) -> RenderableType:
    """The study's figure 1 for the schedules of an evaluation: speed beside what became of the answers.

    The ratio is to the baseline, its interval in brackets (median decode rates beside it); of answers that are not all
    correct the first failing probe is named. Prompts have a ratio of their own where that was measured. Below stands
    why a schedule could not be measured, how the answers were found, and whether the machine was quiet.
    """
    prefill = any(row.prefill for row in evaluation.rows)
    table = _table()
    table.add_column("schedule", overflow="fold", ratio=1)
    table.add_column("experts", justify="right", no_wrap=True)
    _add_speed_columns(table, evaluation.baseline.speed)
    if prefill:
        table.add_column("prompts", justify="right", no_wrap=True)
    table.add_column("s/answer", justify="right", no_wrap=True)
    table.add_column("answers")
    for row in (evaluation.baseline, *evaluation.rows):
        cells: list[RenderableType] = [Text(visible(row.schedule.name)), str(row.total_experts), *_speed(row.speed)]
        cells += [f"{row.prefill.ratio:.3f}" if row.prefill else ""] if prefill else []
        table.add_row(*cells, _significant(row.seconds_per_correct), _answers(row.verdict, row.outcomes))
    return _page("Evaluation: decode speed and gate answers beside the baseline", table, _notes(evaluation))


def _significant(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3g}"


def _notes(evaluation: Evaluation) -> Iterator[str]:
    yield from (f"{row.schedule.name}: {row.error}" for row in evaluation.rows if row.error is not None)
    yield "s/answer: seconds of decoding for each correct answer."
    beaten = [row.schedule.name for row in evaluation.rows if row.speed and row.speed.ended is Ended.BEATEN]
    if beaten:
        yield f"Measured no further, surely slower than one that passed: {', '.join(beaten)}."
    if evaluation.calibration:
        yield f"Answers of other schedules: {evaluation.calibration.describe()}."
    yield from (f"The machine was not quiet: {warning}." for warning in evaluation.warnings())


def screening_table(study: StudyRecord, *, rows: int = 8) -> RenderableType:
    """Both sides of a study's frontier: the fastest schedules that passed, and those that were faster and failed.

    At most ``rows`` of the first and half as many of the second, all of it screening: the probes that chose these
    schedules are the ones that judged them. Baseline failures are named below the table.
    """
    evaluated = sorted((trial for trial in study.evaluated if trial.speed), key=_ratio, reverse=True)
    passed = [trial for trial in evaluated if trial.accepted]
    limit = _ratio(passed[0]) if passed else 0.0
    failed = [trial for trial in evaluated if trial.verdict.result is Result.FAIL and _ratio(trial) > limit]
    table = _table()
    table.add_column("trial", justify="right", no_wrap=True)
    table.add_column("experts in blocks", overflow="fold", ratio=1)
    _add_speed_columns(table, evaluated[0].speed if evaluated else None)
    table.add_column("gate")
    # Of the failed ones the slowest lie next to the frontier.
    for position, trials in enumerate((passed[:rows], failed[::-1][: max(rows // 2, 1)])):
        if position and passed and trials:
            table.add_row()
        for trial in trials:
            key = _breakable(trial.key)
            table.add_row(str(trial.number), key, *_speed(trial.speed), _answers(trial.verdict, trial.outcomes))
    title = f"Screening, not validated: study {study.name}, {len(study.evaluated)} schedules, {len(passed)} passed"
    return _page(title, table, [*_baseline_notes(study), *_skipped_notes(study)])


def _baseline_notes(study: StudyRecord) -> Iterator[str]:
    if "placement" in study.identity:
        yield f"Placement: {study.identity['placement']}."
    if study.baseline is None:
        yield "The baseline was not measured yet."
        return
    yield f"Baseline: {study.baseline.tokens_per_s:.1f} tokens/s, {_answers_text(study.baseline.verdict)}."
    if study.baseline.failures:
        yield f"Probes that the baseline fails: {', '.join(study.baseline.failures)}."
    if study.baseline.calibration:
        yield f"Gate: the baseline's answers are checked as drafts; {study.baseline.calibration.describe()}."


def _skipped_notes(study: StudyRecord) -> Iterator[str]:
    """What was not done, and why: a schedule without a ratio or without a verdict is not in the table."""
    reasons = Counter(skipped for trial in study.evaluated if (skipped := trial.speed_skipped or trial.gate_skipped))
    untimed = {trial.speed_skipped for trial in study.evaluated}
    for reason, times in sorted(reasons.items()):
        what = "were not timed" if reason in untimed else "skipped the gate"
        yield f"{times} of {len(study.evaluated)} schedules {what}: {reason}."


def _ratio(trial: TrialRecord) -> float:
    return 0.0 if trial.speed is None else trial.speed.ratio


# ---------------------------------------------------------------------------------------------------------------------
# Validated results


@dataclass(frozen=True, slots=True)
class _Validated:
    """One schedule of an acceptance run, wherever it was read from."""

    name: str
    experts_used: str
    speed: SpeedRatio
    gate: Verdict
    holdout: PairedDifference
    accepted: bool

    @classmethod
    def of_result(cls, result: AcceptanceResult, experts_used: str) -> _Validated:
        accepted = result.acceptance.accepted
        return cls(result.schedule.name, experts_used, result.speed, result.gate, result.holdout, accepted)

    @classmethod
    def of_even_spread(cls, even: EvenSpread) -> _Validated:
        schedule = even.schedule
        return cls(f"└ {schedule.name}", schedule.experts_used, even.speed, even.gate, even.holdout, even.accepted)


def validated_table(results: Sequence[AcceptanceResult]) -> RenderableType:
    """The acceptance run: each schedule with the even spread of the same total below it, then every objection.

    ``holdout`` is accuracy on fresh probes; in brackets the difference to the baseline's on the same ones, in points.
    """
    table = _validated_table(results[0].speed if results else None)
    for position, result in enumerate(results):
        if position:
            table.add_row()
        _add_validated(table, _Validated.of_result(result, format_counts(dict(result.schedule.experts_used))))
        if result.even_spread is not None:
            _add_validated(table, _Validated.of_even_spread(result.even_spread))
    objections = (f"{result.schedule.name}: {reason}" for result in results for reason in result.acceptance.reasons)
    return _page("Acceptance run (validated)", table, objections)


def certificate_table(certificate: Certificate) -> RenderableType:
    """A certificate's schedule and the even spread of the same total, with the rules they were held to."""
    table = _validated_table(certificate.speed)
    schedule, even = certificate.schedule, certificate.even_spread
    speed, gate, holdout = certificate.speed, certificate.gate, certificate.holdout
    _add_validated(table, _Validated(schedule.name, schedule.experts_used, speed, gate, holdout, accepted=True))
    if even is not None:
        _add_validated(table, _Validated.of_even_spread(even))
    return _page(f"Certificate of {certificate.created} (validated)", table, _certificate_notes(certificate))


def _certificate_notes(certificate: Certificate) -> Iterator[str]:
    bound, holdout, even = certificate.holdout_failure_bound_95, certificate.holdout, certificate.even_spread
    yield f"Rule: {certificate.acceptance_rule.describe()}."
    yield (
        f"Holdout against the baseline: {_points(holdout.difference)} "
        f"[{_points(holdout.low)}, {_points(holdout.high)}] points; at most {bound:.1%} of fresh questions fail (95 %)."
    )
    if even is not None:
        over = even.certified_over_even
        yield f"Speed over the even spread of the same total: {_interval(over)}."
    else:
        yield "The schedule spreads its total evenly itself."


def _validated_table(example: SpeedRatio | None) -> Table:
    table = _table()
    table.add_column("schedule", overflow="fold", ratio=1)
    table.add_column(_ratio_header(example), justify="right", no_wrap=True)
    table.add_column("gate", justify="right", no_wrap=True)
    table.add_column("holdout", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    return table


def _add_validated(table: Table, row: _Validated) -> None:
    word = _signed(Result.PASS if row.accepted else Result.FAIL, "accepted" if row.accepted else "refused")
    holdout = f"{row.holdout.candidate_correct}/{row.holdout.n} ({_points(row.holdout.difference)})"
    gate = f"{row.gate.passed}/{row.gate.total}"
    name = Text(visible(row.name)).append(f"\n{_breakable(row.experts_used)}", style="dim")
    table.add_row(name, _interval(row.speed), gate, holdout, word)


# ---------------------------------------------------------------------------------------------------------------------
# Cells


def _table() -> Table:
    return Table(box=None, pad_edge=False, header_style="dim")


def _page(title: str, table: Table, notes: Iterable[str]) -> RenderableType:
    """Title, table, notes. The title is no part of the table: rich would wrap it to the width of a narrow one."""
    return Group(Text(visible(title), style="bold"), table, *(Text(visible(note), style="dim") for note in notes))


def _add_speed_columns(table: Table, example: SpeedRatio | None) -> None:
    table.add_column(_ratio_header(example), justify="right", no_wrap=True)
    table.add_column("tok/s", justify="right", no_wrap=True)


def _ratio_header(example: SpeedRatio | None) -> str:
    return "speed ratio" if example is None else f"speed ratio [{example.confidence:.0%}]"


def _speed(speed: SpeedRatio | None) -> tuple[str, str]:
    return ("not measured", "") if speed is None else (_interval(speed), f"{speed.candidate_tokens_per_s:.1f}")


def _interval(speed: SpeedRatio) -> str:
    return f"{speed.ratio:.3f} [{speed.low:.3f}, {speed.high:.3f}]"


def _points(share: float) -> str:
    """A difference of two shares in percentage points, with its sign; none for nothing."""
    return f"{100 * share:+.1f}" if round(100 * share, 1) else "±0"


def _breakable(key: str) -> str:
    """A key with room for line breaks after its commas."""
    return key.replace(",", ", ")


def _answers(verdict: Verdict, outcomes: Sequence[Outcome]) -> Text:
    """How many answers were right, and of the first that counts against the schedule what was wrong with it."""
    failed = next((outcome for outcome in outcomes if outcome.probe in verdict.failures), None)
    if verdict.result is Result.FAIL and failed is not None:
        more = f" (+{len(verdict.failures) - 1})" if len(verdict.failures) > 1 else ""
        return _signed(failed.status, f"{failed.status.replace('_', ' ')}: {failed.probe}{more}")
    return _signed(verdict.result, _answers_text(verdict))


def _answers_text(verdict: Verdict) -> str:
    return verdict.reason if verdict.result is Result.UNDECIDED else f"{verdict.passed}/{verdict.total} correct"


def _signed(word: str, text: str) -> Text:
    sign, colour = _SIGNS[str(word)]
    return Text(f"{sign} {visible(text)}", style=colour)
