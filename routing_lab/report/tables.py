"""Terminal tables: figure 1's table of an evaluation, a study's screening, an acceptance run; each fits 80 columns.

Screening and validated results never share a table, and every title says which of the two it shows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
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

_UNBOUNDED: Final = 10_000
"""Wide enough for a table to be as wide as it is."""

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

    The ratio is to the baseline, its interval in brackets (median decode rates beside it). Prompts have a ratio of
    their own where that was measured. Below stands why a schedule could not be measured or judged, how the answers were
    found, and whether the machine was quiet. Names stand above their rows where both do not fit in a line.
    """
    prefill = any(row.prefill for row in evaluation.rows)
    shown = (evaluation.baseline, *evaluation.rows)
    table = _table()
    table.add_column("experts", justify="right", no_wrap=True)
    _add_speed_columns(table, evaluation.baseline.speed)
    if prefill:
        table.add_column("prompts", justify="right", no_wrap=True)
    table.add_column("s/answer", justify="right", no_wrap=True)
    table.add_column("answers", no_wrap=True)
    seconds = _alike([row.seconds_per_correct for row in shown])
    for row, each in zip(shown, seconds, strict=True):
        cells: list[RenderableType] = [str(row.total_experts), *_speed(row.speed)]
        cells += [f"{row.prefill.ratio:.3f}" if row.prefill else ""] if prefill else []
        table.add_row(*cells, each, _answers(row.verdict, row.outcomes))
    named = _NamedRows("schedule", tuple(visible(row.schedule.name) for row in shown), table)
    return _page("Evaluation: decode speed and gate answers beside the baseline", named, _notes(evaluation))


@dataclass(frozen=True, slots=True)
class _NamedRows:
    """A table with one line to a row, and names: in front of the rows, or above them where that does not fit."""

    head: str
    names: tuple[str, ...]
    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = console.render_lines(self.table, options.update_width(_UNBOUNDED), pad=False)
        widest = max(cell_len(name) for name in (self.head, *self.names)) + 2
        lines = [Text.assemble(*((one.text, one.style or "") for one in row)) for row in rows]
        beside = widest + max(line.cell_len for line in lines) <= options.max_width
        for number, (name, line) in enumerate(zip((self.head, *self.names), lines, strict=True)):
            label = Text(name, style="" if number else "dim")
            if beside:
                label.pad_right(widest - cell_len(name))
                yield label + line
            else:
                yield from ([label, line] if number else [line])


def _alike(seconds: Sequence[float | None]) -> list[str]:
    """Seconds with the same decimals in every row: as many as give the smallest three digits that count."""
    known = [value for value in seconds if value]
    decimals = max(0, 2 - math.floor(math.log10(min(known)))) if known else 0
    return ["" if value is None else f"{value:.{decimals}f}" for value in seconds]


def _notes(evaluation: Evaluation) -> Iterator[str]:
    undecided = (row for row in evaluation.rows if row.error is None and row.verdict.result is Result.UNDECIDED)
    yield from (f"{row.schedule.name}: undecided, {row.verdict.reason}" for row in undecided)
    yield from (f"{row.schedule.name}: {row.error}" for row in evaluation.rows if row.error is not None)
    yield "s/answer: seconds of decoding for each correct answer."
    beaten = [row.schedule.name for row in evaluation.rows if row.speed and row.speed.ended is Ended.BEATEN]
    if beaten:
        yield f"Measured no further, surely slower than one that passed: {', '.join(beaten)}."
    if evaluation.calibration:
        yield evaluation.calibration.describe()
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
    rate = f"{_rate(study.baseline.tokens_per_s)} tokens/s (measured once, at the start)"
    yield f"Baseline: {rate}, {_answers_text(study.baseline.verdict)}."
    if study.baseline.failures:
        yield f"Probes that the baseline fails: {', '.join(study.baseline.failures)}."
    if study.baseline.calibration:
        yield study.baseline.calibration.describe()


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


def validated_table(results: Sequence[AcceptanceResult], certificate: Certificate | None = None) -> RenderableType:
    """The acceptance run: each schedule with the even spread of the same total below it, then every objection.

    ``holdout`` is accuracy on fresh probes; in brackets the difference to the baseline's on the same ones, in points.
    Of the schedule that got the ``certificate`` everything that its own table says follows, and why it is that one.
    """
    table = _validated_table(results[0].speed if results else None)
    for position, result in enumerate(results):
        if position:
            table.add_row()
        _add_validated(table, _Validated.of_result(result, format_counts(dict(result.schedule.experts_used))))
        if result.even_spread is not None:
            _add_validated(table, _Validated.of_even_spread(result.even_spread))
    return _page("Acceptance run (validated)", table, _acceptance_notes(results, certificate))


def _acceptance_notes(results: Sequence[AcceptanceResult], certificate: Certificate | None) -> Iterator[str]:
    for result in results:
        yield from (f"{result.schedule.name}: {reason}" for reason in result.acceptance.reasons)
        even = result.even_spread
        if even is not None:
            yield from (f"└ {even.schedule.name}: {reason}" for reason in result.even_spread_reasons)
    yield from (changed for result in results if (changed := _changed(result.schedule.name, result.holdout)))
    yield from _choice(results)
    if certificate is not None:
        yield from _certificate_notes(certificate)
    for result in results:
        warnings = result.speed.warnings()
        yield from (f"The machine was not quiet (measuring {result.schedule.name}): {one}." for one in warnings)


def _changed(name: str, holdout: PairedDifference) -> str:
    """The holdout probes that a schedule loses and gains against the baseline; empty where it changes none."""
    parts = [
        f"{len(ids)} {what} ({_named(ids)})"
        for ids, what in ((holdout.lost, "lost"), (holdout.gained, "gained"))
        if ids
    ]
    return f"{name} on the holdout, against the baseline: {', '.join(parts)}." if parts else ""


def _named(probes: Sequence[str], most: int = 5) -> str:
    return ", ".join(probes[:most]) + (f" and {len(probes) - most} more" if len(probes) > most else "")


def _choice(results: Sequence[AcceptanceResult]) -> Iterator[str]:
    """Why the fastest accepted schedule did not get the certificate, where it did not."""
    from routing_lab.validate import best_of

    accepted = [result for result in results if result.acceptance.accepted]
    if not accepted:
        return
    best, fastest = best_of(accepted), max(accepted, key=lambda result: result.speed.ratio)
    if best is not fastest:
        right = best.holdout.candidate_correct, fastest.holdout.candidate_correct
        yield (
            f"{fastest.schedule.name} and {best.schedule.name} are equally fast within the intervals; "
            f"{best.schedule.name} has more right answers on the holdout ({right[0]} against {right[1]})."
        )


def certificate_table(certificate: Certificate) -> RenderableType:
    """A certificate's schedule and the even spread of the same total, with the rules they were held to."""
    table = _validated_table(certificate.speed)
    schedule, even = certificate.schedule, certificate.even_spread
    speed, gate, holdout = certificate.speed, certificate.gate, certificate.holdout
    _add_validated(table, _Validated(schedule.name, schedule.experts_used, speed, gate, holdout, accepted=True))
    if even is not None:
        _add_validated(table, _Validated.of_even_spread(even))
    changed = _changed(schedule.name, holdout)
    notes = [*([changed] if changed else []), *_certificate_notes(certificate)]
    return _page(f"Certificate of {certificate.created} (validated)", table, notes)


def _certificate_notes(certificate: Certificate) -> Iterator[str]:
    bound, holdout, even = certificate.holdout_failure_bound_95, certificate.holdout, certificate.even_spread
    least = certificate.speed_rule.min_ratio_low
    yield f"Rule: {certificate.acceptance_rule.describe()}; the speed ratio's interval wholly above {least:g}."
    yield (
        f"{certificate.schedule.name} on the holdout, against the baseline: {_points(holdout.difference)} "
        f"[{_points(holdout.low)}, {_points(holdout.high)}] points; at most {100 * bound:.1f} % of fresh questions "
        "fail (95 %)."
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


def _page(title: str, table: RenderableType, notes: Iterable[str]) -> RenderableType:
    """Title, table, notes. The title is no part of the table: rich would wrap it to the width of a narrow one."""
    return Group(Text(visible(title), style="bold"), table, *(Text(visible(note), style="dim") for note in notes))


def _add_speed_columns(table: Table, example: SpeedRatio | None) -> None:
    table.add_column(_ratio_header(example), justify="right", no_wrap=True)
    table.add_column("tok/s", justify="right", no_wrap=True)


def _ratio_header(example: SpeedRatio | None) -> str:
    return "speed ratio" if example is None else f"speed ratio [{_percent(example.confidence)}]"


def _percent(confidence: float) -> str:
    """Two decimals at most, and rounded down: an interval covers no less than its head says."""
    return f"{math.floor(1e4 * confidence + 1e-6) / 100:g} %"


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.1f}"


def _speed(speed: SpeedRatio | None) -> tuple[str, str]:
    return ("not measured", "") if speed is None else (_interval(speed), _rate(speed.candidate_tokens_per_s))


def _interval(speed: SpeedRatio) -> str:
    return f"{speed.ratio:.3f} [{speed.low:.3f}, {speed.high:.3f}]"


def _points(share: float) -> str:
    """A difference of two shares in percentage points, with its sign; none for nothing."""
    return f"{100 * share:+.1f}" if round(100 * share, 1) else "±0"


def _breakable(key: str) -> str:
    """A key with room for line breaks after its commas."""
    return key.replace(",", ", ")


def _answers(verdict: Verdict, outcomes: Sequence[Outcome]) -> Text:
    """How many answers were right, or how many of those asked were not, and in which way."""
    if verdict.result is not Result.FAIL:
        return _signed(verdict.result, _answers_text(verdict))
    kinds = {outcome.status for outcome in outcomes if outcome.probe in verdict.failures}
    kind = next(iter(kinds)) if len(kinds) == 1 else Status.WRONG_ANSWER
    word = {Status.WRONG_ANSWER: "wrong", Status.NO_FINAL_ANSWER: "unanswered"}[kind] if len(kinds) == 1 else "failed"
    return _signed(kind, f"{len(verdict.failures)} of {verdict.run} {word}")


def _answers_text(verdict: Verdict) -> str:
    if verdict.result is Result.UNDECIDED:
        return "undecided"
    excused = f", {len(verdict.excused)} excused" if verdict.excused else ""
    return f"{verdict.passed}/{verdict.total} correct{excused}"


def _signed(word: str, text: str) -> Text:
    sign, colour = _SIGNS[str(word)]
    return Text(f"{sign} {visible(text)}", style=colour)
