"""Ask probes without decoding their answers: the baseline's completions are drafts that a candidate only confirms.

``Transcripts.of_baseline`` decodes every probe under the model's own counts, once. Under any other schedule
``verify_probes`` then has the same outcomes as ``run_probes`` would have, for a prompt's price per token instead of a
completion's, wherever the candidate says what the baseline said. It also tells how far along the baseline's words a
candidate kept to them (``Outcome.kept``), which is a graded answer where pass and fail is a plain one.

**When a batch is no evidence.** Logits of a batch can differ from those of single tokens. ``calibrate`` measures by how
much, on the machine and the probes at hand: it decodes some completions token by token and computes the same positions
in batches. If every margin agrees to the last bit the tie margin is 0. Else it is ``SAFETY`` times the largest
difference seen, and a completion with two best tokens closer than that is decoded after all. Where that would be most
of them, checking drafts is not worth it, and the calibration says so.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from routing_lab.answers import Judge, Status
from routing_lab.errors import AttestationError, RuntimeFailureError, RuntimeUnsupportedError
from routing_lab.probes.probeset import Probe, ProbeSet
from routing_lab.probes.run import (
    MAX_CONSECUTIVE_ERRORS,
    Outcome,
    decoded,
    judged,
    run_probe,
    runtime_error,
)
from routing_lab.runtime.base import DRAFTS_TOGETHER, Draft, Generation, Runtime, Verifier
from routing_lab.schedule import Schedule

__all__ = ["SAFETY", "Calibration", "Transcripts", "Verification", "calibrate", "verify_probes"]

SAFETY: Final = 2.0
"""The tie margin, as a multiple of the largest difference between a batch and single tokens that was seen."""

WORTHWHILE: Final = 0.5
"""Share of doubtful completions from which on checking drafts is left alone."""

MENTIONED: Final = 0.005
"""Share of doubtful completions from which on their number is said; below it stands that there are some."""

CALIBRATION_PROBES: Final = 12
"""Probes that are decoded anew under another schedule to compare with; the baseline's are compared as well."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """How well batches agree with single tokens here.

    ``positions`` were compared, ``identical`` of them agreed to the last bit, and the others by no more than
    ``largest_difference`` (logits, in the gap between the two best tokens). ``doubtful`` is the share of the compared
    completions with a margin below ``tie_margin``. ``reason`` says why drafts are not checked, ``None`` where they are.
    """

    tie_margin: float
    positions: int
    identical: int
    largest_difference: float
    doubtful: float
    reason: str | None = None

    def describe(self) -> str:
        """The calibration in one sentence for people; the numbers are in the fields."""
        if self.reason:
            return f"Every answer was decoded: {self.reason}."
        if self.identical == self.positions:
            return "Answers were checked, not decoded; none could be too close to call."
        share = (
            f"{self.doubtful:.0%}".replace("%", " %") if self.doubtful >= MENTIONED or not self.doubtful else "< 1 %"
        )
        return f"Answers were checked, not decoded; {share} of them were too close to call and were decoded."

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Transcripts:
    """What the baseline wrote: per probe the rendered prompt and the tokens of its completion, and its outcomes."""

    prompts: Mapping[str, str]
    tokens: Mapping[str, tuple[int, ...]]
    margins: Mapping[str, tuple[float, ...]]
    outcomes: tuple[Outcome, ...]

    @classmethod
    def of_baseline(
        cls,
        runtime: Runtime,
        probe_set: ProbeSet,
        probes: Sequence[Probe],
        judge: Judge,
        progress: Callable[[Outcome], None] | None = None,
    ) -> Transcripts:
        """Apply the model's own counts and decode every probe.

        A probe on which the model's process is lost twice has an outcome and no transcript. Raises as
        ``Runtime.apply``.
        """
        runtime.apply(Schedule.baseline(runtime.facts))
        kept: dict[str, tuple[str, Generation]] = {}
        outcomes = []
        for probe in probes:
            outcome = _decoded(runtime, probe_set, probe, judge, kept)
            if outcome.status is Status.RUNTIME_ERROR:  # perhaps something else killed the process
                outcome = _decoded(runtime, probe_set, probe, judge, kept)
            outcomes.append(outcome)
            if progress:
                progress(outcome)
        said = {probe: one for probe, (_, one) in kept.items() if one.token_ids is not None}
        return cls(
            prompts={probe: prompt for probe, (prompt, _) in kept.items()},
            tokens={probe: one.token_ids for probe, one in said.items() if one.token_ids is not None},
            margins={probe: one.margins for probe, one in said.items() if one.margins is not None},
            outcomes=tuple(outcomes),
        )

    def to_dict(self) -> dict[str, Any]:
        """What a draft is made of, as JSON can hold it; the outcomes and margins are not."""
        return {probe: [self.prompts[probe], list(tokens)] for probe, tokens in self.tokens.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], outcomes: tuple[Outcome, ...]) -> Transcripts:
        """Inverse of ``to_dict``, but for the margins."""
        return cls(
            prompts={probe: prompt for probe, (prompt, _) in data.items()},
            tokens={probe: tuple(tokens) for probe, (_, tokens) in data.items()},
            margins={},
            outcomes=outcomes,
        )

    def draft(self, probe_set: ProbeSet, probe: Probe) -> Draft:
        """The transcript of ``probe`` as a draft. Raises ``KeyError`` where there is none."""
        return Draft(self.prompts[probe.id], self.tokens[probe.id], probe_set.budget(probe))


@dataclass(frozen=True, slots=True)
class Verification:
    """All that checking drafts needs to know."""

    transcripts: Transcripts
    calibration: Calibration


def _decoded(
    runtime: Runtime, probe_set: ProbeSet, probe: Probe, judge: Judge, kept: dict[str, tuple[str, Generation]]
) -> Outcome:
    try:
        prompt, generation = decoded(runtime, probe_set, probe, margins=True)
    except RuntimeFailureError as failure:
        return runtime_error(probe, failure)
    kept[probe.id] = (prompt, generation)
    return judged(probe_set, probe, prompt, generation, judge)


def calibrate(runtime: Runtime, probe_set: ProbeSet, probes: Sequence[Probe], transcripts: Transcripts) -> Calibration:
    """Compare batches with single tokens: on the baseline's transcripts, and on fresh ones under half of its counts.

    What cannot be compared (the runtime cannot set such counts, or its process is lost) is a calibration with a reason.
    Which schedule is applied afterwards is not said.

    Raises:
        AttestationError: The runtime does not do what it says.
    """
    known = [probe for probe in probes if probe.id in transcripts.tokens and probe.id in transcripts.margins]
    if not isinstance(runtime, Verifier) or not known:
        return _decode_everything("this runtime cannot check drafts")
    baseline = Schedule.baseline(runtime.facts)
    half = {block: max(1, count // 2) for block, count in runtime.facts.experts_used.items()}
    sample = random.Random(0).sample(known, min(CALIBRATION_PROBES, len(known)))  # noqa: S311 - nothing secret
    pairs: list[tuple[float, float]] = []
    try:
        runtime.apply(Schedule.from_counts("half", half))
        fresh = [_decoded_alone(runtime, probe_set, transcripts.draft(probe_set, probe)) for probe in sample]
        _compare(runtime, probe_set, fresh, pairs)
        runtime.apply(baseline)
        own = [(transcripts.draft(probe_set, probe), transcripts.margins[probe.id]) for probe in known]
        _compare(runtime, probe_set, own, pairs)
    except AttestationError:
        raise
    except (RuntimeUnsupportedError, RuntimeFailureError) as error:
        return _decode_everything(f"batches could not be compared with single tokens: {error}")
    return _weighed(pairs, [min(margins) for _, margins in (*fresh, *own) if margins])


def _decode_everything(reason: str) -> Calibration:
    return Calibration(0.0, 0, 0, 0.0, 1.0, reason)


def _weighed(pairs: Sequence[tuple[float, float]], smallest: Sequence[float]) -> Calibration:
    """What the margins alone and in batches, and the smallest margin of each completion, come to."""
    differences = [abs(alone - batched) for alone, batched in pairs]
    largest = max(differences, default=0.0)
    tie_margin = SAFETY * largest
    doubtful = sum(margin < tie_margin for margin in smallest) / len(smallest)
    reason = None
    if doubtful > WORTHWHILE:
        reason = f"{100 * doubtful:.0f} % of the answers are too close to call by checking them ({largest:.2g} logits)"
    return Calibration(tie_margin, len(pairs), differences.count(0.0), largest, doubtful, reason)


def _decoded_alone(runtime: Runtime, probe_set: ProbeSet, draft: Draft) -> tuple[Draft, Sequence[float]]:
    """A draft of what decoding really gives, and its margins."""
    made = runtime.generate(draft.prompt, max_tokens=draft.max_tokens, stop=probe_set.stop, margins=True)
    return replace(draft, tokens=made.token_ids or ()), made.margins or ()


def _compare(
    runtime: Verifier,
    probe_set: ProbeSet,
    decoded: Sequence[tuple[Draft, Sequence[float]]],
    pairs: list[tuple[float, float]],
) -> None:
    """Add the margins of the same positions alone and in a batch, up to where the two part."""
    checked = runtime.verify([draft for draft, _ in decoded], stop=probe_set.stop)
    for (draft, alone), verified in zip(decoded, checked, strict=True):
        batched = verified.generation.margins or ()
        # At the first other token the two gaps are between other pairs of tokens; they point in opposite directions.
        pairs += list(zip(alone, batched[: verified.kept], strict=False))
        if verified.kept < min(len(draft.tokens), len(alone)) and verified.kept < len(batched):
            pairs.append((alone[verified.kept], -batched[verified.kept]))


def verify_probes(
    runtime: Runtime,
    probe_set: ProbeSet,
    probes: Sequence[Probe],
    judge: Judge,
    verification: Verification,
    *,
    stop_after_failures: int | None = 1,
    excused: Collection[str] = (),
    progress: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """The outcomes that ``run_probes`` would have under the schedule applied, most of them without decoding.

    The probes are checked ``DRAFTS_TOGETHER`` at a time, so that a run that stops early may have outcomes of a few
    probes behind the one that ended it. Probes without a transcript, doubtful ones and those of a batch in which the
    model's process was lost are decoded. Arguments and errors are those of ``run_probes``.
    """
    if stop_after_failures is not None and stop_after_failures < 1:
        raise ValueError(f"stop_after_failures must be positive or None, got {stop_after_failures}")
    outcomes: list[Outcome] = []
    errors_in_a_row = 0

    def over(new: Sequence[Outcome]) -> bool:
        nonlocal errors_in_a_row
        for outcome in new:
            outcomes.append(outcome)
            errors_in_a_row = errors_in_a_row + 1 if outcome.status is Status.RUNTIME_ERROR else 0
            if progress:
                progress(outcome)
        failures = sum(not outcome.correct and outcome.probe not in excused for outcome in outcomes)
        enough = stop_after_failures is not None and failures >= stop_after_failures
        return enough or errors_in_a_row == MAX_CONSECUTIVE_ERRORS

    for start in range(0, len(probes), DRAFTS_TOGETHER):
        part = probes[start : start + DRAFTS_TOGETHER]
        sure = _verified(runtime, probe_set, part, judge, verification)
        # What is known is counted first: a sure failure may spare the decoding of the others.
        if over([sure[probe.id] for probe in part if probe.id in sure]):
            break
        left = (probe for probe in part if probe.id not in sure)
        if any(over([run_probe(runtime, probe_set, probe, judge, margins=True)]) for probe in left):
            break
    return outcomes


def _verified(
    runtime: Runtime,
    probe_set: ProbeSet,
    probes: Sequence[Probe],
    judge: Judge,
    verification: Verification,
) -> dict[str, Outcome]:
    """The outcomes of the probes that a batch could decide, by probe."""
    transcripts, calibration = verification.transcripts, verification.calibration
    drafted = [probe for probe in probes if probe.id in transcripts.tokens]
    if calibration.reason or not drafted or not isinstance(runtime, Verifier):
        return {}
    drafts = [transcripts.draft(probe_set, probe) for probe in drafted]
    try:
        verified = runtime.verify(drafts, stop=probe_set.stop, tie_margin=calibration.tie_margin)
    except RuntimeFailureError:
        return {}  # decoding them one by one shows which of them it was
    return {
        probe.id: replace(judged(probe_set, probe, transcripts.prompts[probe.id], one.generation, judge), kept=one.kept)
        for probe, one in zip(drafted, verified, strict=True)
        if not one.doubtful
    }
