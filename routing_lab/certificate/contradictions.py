"""What a certificate says of itself that cannot be true together: every conclusion is drawn again from its answers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from routing_lab.answers import Status
from routing_lab.certificate.parts import Answer, EvenSpread
from routing_lab.errors import Problem
from routing_lab.gate import PairedDifference, Verdict, accept, decide, failure_bound, paired_difference
from routing_lab.measure import SpeedRatio
from routing_lab.model import format_blocks
from routing_lab.overrides import parse_experts
from routing_lab.probes import Outcome

if TYPE_CHECKING:
    from routing_lab.certificate.document import Certificate

__all__ = ["contradictions"]

MAX_ROUNDS: Final = 400
"""The time for an interval grows with the third power of the rounds; 24 are usual."""


def contradictions(certificate: Certificate) -> list[Problem]:
    """All of them. The values are within their limits (see ``parts``); nothing else is taken for granted."""
    even = certificate.even_spread
    speeds = {"speed": certificate.speed}
    if even is not None:
        speeds |= {"even_spread.speed": even.speed, "even_spread.certified_over_even": even.certified_over_even}
    return [
        *_of_blocks(certificate),
        *_of_answers(certificate),
        *(problem for where, speed in speeds.items() for problem in _of_speed(where, speed)),
        *_of_acceptance(certificate),
        *([] if even is None else _of_even_spread(certificate, even)),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Blocks and counts


def _of_blocks(certificate: Certificate) -> Iterator[Problem]:
    model, even = certificate.model, certificate.even_spread
    own = parse_experts(model.experts_used)
    keys = {"model": model.experts_used, "schedule": certificate.schedule.experts_used}
    if even is not None:
        keys["even_spread.schedule"] = even.schedule.experts_used
    for part, key in keys.items():
        counts = parse_experts(key)
        if part != "model" and counts.keys() != own.keys():
            listed = f"lists blocks {format_blocks(counts)}, and model.experts_used lists {format_blocks(own)}"
            yield Problem(f"{part}.experts_used", listed)
        if (most := max(counts.values())) > model.experts:
            yield Problem(f"{part}.experts_used", f"has a count of {most}, and model.experts is {model.experts}")
    placement = certificate.placement
    named = [*own, *placement.host_experts, *(block for part in placement.host_tensors for block in part.blocks)]
    if (last := max(named)) >= model.blocks:
        yield Problem("model.blocks", f"is {model.blocks}, and block {last} is named")
    of = placement.model
    if of is not None and (of.architecture, of.blocks, of.experts) != (model.architecture, model.blocks, model.experts):
        told = f"{of.architecture} with {of.blocks} blocks of {of.experts} experts"
        yield Problem("placement.model", f"is {told}, and model is another one")


# ---------------------------------------------------------------------------------------------------------------------
# Answers and what follows from them


def _of_answers(certificate: Certificate) -> Iterator[Problem]:
    misfits = list(_of_asked_probes(certificate))
    yield from misfits
    if misfits:
        return
    gate, holdout = _outcomes(certificate.gate_answers), _outcomes(certificate.holdout_answers)
    baseline = _outcomes(certificate.baseline_holdout_answers)
    yield from _differences("gate", decide(gate, certificate.probes.gate), certificate.gate)
    yield from _differences("holdout", paired_difference(baseline, holdout), certificate.holdout)
    bound = failure_bound(sum(not outcome.correct for outcome in holdout), len(holdout))
    if not _agree(bound, certificate.holdout_failure_bound_95):
        yield _difference("holdout_failure_bound_95", bound, certificate.holdout_failure_bound_95)


def _of_asked_probes(certificate: Certificate) -> Iterator[Problem]:
    """The baseline's run over the gate may have ended early; nothing else of an accepted schedule may."""
    gate, holdout = _probes(certificate.gate_answers), _probes(certificate.holdout_answers)
    for split, probes, told in (
        ("gate", gate, certificate.probes.gate),
        ("holdout", holdout, certificate.probes.holdout),
    ):
        if len(probes) != told:
            yield Problem(f"probes.{split}", f"is {told}, and {split}_answers has {len(probes)}")
    if twice := _twice([*gate, *holdout]):
        yield Problem("holdout_answers" if twice in holdout else "gate_answers", f"probe {twice!r} is there twice")
    baseline_gate, baseline_holdout = (
        _probes(certificate.baseline_gate_answers),
        _probes(certificate.baseline_holdout_answers),
    )
    if _twice(baseline_gate) or not set(baseline_gate) <= set(gate):
        yield Problem("baseline_gate_answers", "has other probes than gate_answers, or one twice")
    if _twice(baseline_holdout) or set(baseline_holdout) != set(holdout):
        yield Problem("baseline_holdout_answers", "has other probes than holdout_answers, or one twice")


def _of_speed(where: str, speed: SpeedRatio) -> Iterator[Problem]:
    if len(speed.candidate_rates) > MAX_ROUNDS:
        yield Problem(f"{where}.candidate_rates", f"has {len(speed.candidate_rates)} rounds, above {MAX_ROUNDS}")
        return
    try:
        computed = SpeedRatio.from_rates(speed.candidate_rates, speed.baseline_rates, speed.confidence, speed.ended)
    except ValueError as error:
        yield Problem(f"{where}.candidate_rates", str(error))
    else:
        yield from _differences(where, computed, speed)


def _of_acceptance(certificate: Certificate) -> Iterator[Problem]:
    for reason in accept(certificate.gate, certificate.holdout, certificate.acceptance_rule).reasons:
        yield Problem("acceptance_rule", f"is not met: {reason}")
    least = certificate.speed_rule.min_ratio_low
    if certificate.speed.low <= least:
        yield Problem("speed_rule", f"is not met: speed.low is {certificate.speed.low:.3f}, not above {least:g}")


# ---------------------------------------------------------------------------------------------------------------------
# The even spread: its answers are not kept, but what it got wrong is, and with the probes that makes all of them


def _of_even_spread(certificate: Certificate, even: EvenSpread) -> Iterator[Problem]:
    wanted, counts = parse_experts(certificate.schedule.experts_used), parse_experts(even.schedule.experts_used)
    if sum(counts.values()) != sum(wanted.values()) or max(counts.values()) - min(counts.values()) > 1:
        yield Problem("even_spread.schedule.experts_used", "is no even spread of the schedule's total")
    if even.speed.baseline_rates != certificate.speed.baseline_rates:
        yield Problem("even_spread.speed.baseline_rates", "are not those of speed, and both are of the same rounds")
    over_even = even.certified_over_even
    if over_even.candidate_rates != certificate.speed.candidate_rates:
        yield Problem("even_spread.certified_over_even.candidate_rates", "are not those of speed.candidate_rates")
    if over_even.baseline_rates != even.speed.candidate_rates:
        yield Problem("even_spread.certified_over_even.baseline_rates", "are not those of even_spread.speed")
    if not list(_of_asked_probes(certificate)):
        yield from _of_even_gate(certificate, even.gate)
        yield from _of_even_holdout(certificate, even.holdout)
    accepted = accept(even.gate, even.holdout, certificate.acceptance_rule).accepted
    if even.accepted != (accepted and even.speed.low > certificate.speed_rule.min_ratio_low):
        yield _difference("even_spread.accepted", not even.accepted, even.accepted)


def _of_even_gate(certificate: Certificate, gate: Verdict) -> Iterator[Problem]:
    ran = _probes(certificate.gate_answers)[: max(gate.run, 0)]  # a run that gives up leaves out the last ones
    failures = frozenset(gate.failures)
    rest = [probe for probe in ran if probe not in failures]
    if len(ran) != gate.run or len(rest) + len(gate.failures) != gate.run or not 0 <= gate.errors <= len(rest):
        yield Problem("even_spread.gate", "its run, errors and failures do not fit the probes of gate_answers")
        return
    status = dict.fromkeys(ran, Status.CORRECT) | dict.fromkeys(failures, Status.WRONG_ANSWER)
    status |= dict.fromkeys(rest[: gate.errors], Status.RUNTIME_ERROR)
    answers = [Answer(probe, status[probe]) for probe in ran]
    computed = decide(_outcomes(answers), certificate.probes.gate)
    # Which probes the runtime failed on is said only in the reason.
    yield from _differences("even_spread.gate", computed, gate, but={"reason"} if gate.errors else ())


def _of_even_holdout(certificate: Certificate, holdout: PairedDifference) -> Iterator[Problem]:
    reached = max(holdout.n, 0) + len(holdout.errors)
    baseline = certificate.baseline_holdout_answers[:reached]
    changed = dict.fromkeys(holdout.lost, Status.WRONG_ANSWER) | dict.fromkeys(holdout.gained, Status.CORRECT)
    changed |= dict.fromkeys(holdout.errors, Status.RUNTIME_ERROR)
    answers = [Answer(answer.probe, changed.get(answer.probe, answer.status)) for answer in baseline]
    computed = paired_difference(_outcomes(baseline), _outcomes(answers))
    yield from _differences("even_spread.holdout", computed, holdout)


# ---------------------------------------------------------------------------------------------------------------------
# Comparing


def _differences(where: str, computed: Any, written: Any, but: Iterable[str] = ()) -> Iterator[Problem]:  # noqa: ANN401
    """Every field of a part that is not what it should be."""
    for field in fields(computed):
        pair = getattr(computed, field.name), getattr(written, field.name)
        if field.name not in but and not _agree(*pair):
            yield _difference(f"{where}.{field.name}", *pair)


def _difference(where: str, computed: object, written: object) -> Problem:
    return Problem(where, f"is {_short(written)}, and {_short(computed)} follows from the answers and rates")


def _agree(computed: Any, written: Any) -> bool:  # noqa: ANN401 - parts of the certificate
    """Equal up to the last digits of floats: another machine's logarithm may round differently."""
    if isinstance(computed, float):
        return math.isclose(computed, written, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(computed, tuple):
        return len(computed) == len(written) and all(map(_agree, computed, written))
    return bool(computed == written)


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(str, value[:5]))}{', ...' if len(value) > 5 else ''})"  # noqa: PLR2004 - enough to see
    return f"{value!s:.200}"


def _probes(answers: Iterable[Answer]) -> list[str]:
    return [answer.probe for answer in answers]


def _twice(probes: Sequence[str]) -> str:
    """One of the probes that are there twice; empty where none is."""
    seen: set[str] = set()
    return next((probe for probe in probes if probe in seen or seen.add(probe)), "")  # type: ignore[func-returns-value]


def _outcomes(answers: Iterable[Answer]) -> list[Outcome]:
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
