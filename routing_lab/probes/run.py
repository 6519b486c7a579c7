"""Run probes on a runtime under the schedule it has applied, and judge each completion as data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from routing_lab.answers import Judge, Status
from routing_lab.errors import RuntimeFailureError, UsageError
from routing_lab.probes.probeset import Probe, ProbeSet
from routing_lab.runtime.base import Generation, Runtime

__all__ = [
    "KEPT_CHARACTERS",
    "MAX_CONSECUTIVE_ERRORS",
    "Outcome",
    "decoded",
    "judged",
    "rendered_prompt",
    "run_probe",
    "run_probes",
    "runtime_error",
    "thinking_is_open",
]

KEPT_CHARACTERS = 2000
"""Characters of a completion that an outcome keeps: its end, where the answer is."""

MAX_CONSECUTIVE_ERRORS = 3
"""A process that dies this often in a row will not live on the next probe either, and each try may cost a time-out."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one probe gave under one schedule.

    ``reason`` says more than the status where there is more to say (``budget``, ``ambiguous``; the runtime's message
    for ``runtime_error``). ``text`` is the completion, of a long one the last ``KEPT_CHARACTERS`` characters.
    ``llama_seconds`` is the part of ``seconds`` spent inside libllama, ``tokens`` are the generated ones, and
    ``smallest_margin`` (logits) is how close the completion came to being another one, where that was asked for.
    ``kept`` is how many tokens were taken over from a draft instead of decoded (``None``: there was no draft).
    """

    probe: str
    status: Status
    reason: str | None
    extracted: str | None
    text: str
    prompt_tokens: int
    tokens: int
    seconds: float
    llama_seconds: float
    smallest_margin: float | None = None
    kept: int | None = None

    @property
    def correct(self) -> bool:
        """Whether the exact answer was given."""
        return self.status is Status.CORRECT


def run_probes(
    runtime: Runtime,
    probe_set: ProbeSet,
    probes: Sequence[Probe],
    judge: Judge,
    *,
    stop_after_failures: int | None = 1,
    excused: Collection[str] = (),
    margins: bool = False,
    progress: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Run ``probes`` in their order, each from an empty cache, and return their outcomes.

    The list is shorter than ``probes`` when the run stopped early: after ``stop_after_failures`` outcomes that are not
    correct (``None``: never), or after ``MAX_CONSECUTIVE_ERRORS`` runtime errors in a row. A runtime error counts as
    not correct: once it has happened the run cannot become a pass. Probes in ``excused`` (ids) do not count; that is
    for a policy under which the baseline's own failures are no objection.

    A model process that dies is an outcome (``runtime_error``); the runtime has replaced it by then. Any other
    exception is a broken set-up or a bug and is let through.

    Raises:
        ValueError: ``stop_after_failures`` is not positive.
        UsageError: The runtime cannot take a prompt, for instance because it fills the context; the probe is named.
    """
    if stop_after_failures is not None and stop_after_failures < 1:
        raise ValueError(f"stop_after_failures must be positive or None, got {stop_after_failures}")
    outcomes: list[Outcome] = []
    failures = errors_in_a_row = 0
    for probe in probes:
        outcome = run_probe(runtime, probe_set, probe, judge, margins=margins)
        outcomes.append(outcome)
        if progress is not None:
            progress(outcome)
        errors_in_a_row = errors_in_a_row + 1 if outcome.status is Status.RUNTIME_ERROR else 0
        failures += not outcome.correct and probe.id not in excused
        if failures == stop_after_failures or errors_in_a_row == MAX_CONSECUTIVE_ERRORS:
            break
    return outcomes


def rendered_prompt(runtime: Runtime, probe_set: ProbeSet, probe: Probe) -> str:
    """The raw text that the model gets for ``probe``: the prompt itself, or the model's chat template around it."""
    if probe_set.prompt == "raw":
        return probe.prompt
    return runtime.render_chat(probe.prompt, thinking=probe_set.thinking)


def thinking_is_open(rendered: str, user: str = "") -> bool:
    """Whether a rendered prompt ends inside a reasoning block, so that the completion starts in the middle of it.

    Templates of reasoning models open the tag themselves. Tags that the user's message brings along do not count: a
    question *about* ``<think>`` opens nothing. (They are counted rather than cut out, since a message as short as
    "hi" stands in the tag itself.)
    """
    opened = rendered.count("<think>") - user.count("<think>")
    closed = rendered.count("</think>") - user.count("</think>")
    return opened > closed


def run_probe(runtime: Runtime, probe_set: ProbeSet, probe: Probe, judge: Judge, *, margins: bool = False) -> Outcome:
    """Decode one probe and judge the completion; the loss of the model's process is an outcome too."""
    try:
        prompt, generation = decoded(runtime, probe_set, probe, margins=margins)
    except RuntimeFailureError as failure:
        return runtime_error(probe, failure)
    return judged(probe_set, probe, prompt, generation, judge)


def decoded(runtime: Runtime, probe_set: ProbeSet, probe: Probe, *, margins: bool) -> tuple[str, Generation]:
    """The rendered prompt of a probe and its completion. Raises ``UsageError`` where the prompt does not fit."""
    try:
        prompt = rendered_prompt(runtime, probe_set, probe)
        budget = probe_set.budget(probe)
        return prompt, runtime.generate(prompt, max_tokens=budget, stop=probe_set.stop, margins=margins)
    except UsageError as error:  # most often a prompt that is longer than the context
        raise UsageError(f"probe {probe.id}: {error}; give a larger --context, or change the prompt") from None


def judged(probe_set: ProbeSet, probe: Probe, prompt: str, generation: Generation, judge: Judge) -> Outcome:
    """What the completion of ``prompt``, the rendered text of ``probe``, is worth."""
    user = probe.prompt if probe_set.prompt == "chat" else ""
    judgement = judge.judge(
        generation.text,
        expected=probe.answer,
        answer_type=probe.type,
        finish_reason=generation.finish_reason,
        places=probe.places,
        mode=probe_set.extract,
        thinking_open=thinking_is_open(prompt, user),
    )
    return Outcome(
        probe=probe.id,
        status=judgement.status,
        reason=judgement.reason,
        extracted=judgement.extracted,
        text=generation.text[-KEPT_CHARACTERS:],
        prompt_tokens=generation.prompt_tokens,
        tokens=generation.tokens,
        seconds=generation.seconds,
        llama_seconds=generation.llama_seconds,
        smallest_margin=generation.smallest_margin,
    )


def runtime_error(probe: Probe, failure: RuntimeFailureError) -> Outcome:
    """The outcome of a probe on which the model's process was lost."""
    return Outcome(
        probe=probe.id,
        status=Status.RUNTIME_ERROR,
        reason=str(failure),
        extracted=None,
        text="",
        prompt_tokens=0,
        tokens=0,
        seconds=0.0,
        llama_seconds=0.0,
    )
