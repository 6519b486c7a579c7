"""A runtime without a model, for tests of everything that is built on one; it never pretends to be llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Self

from routing_lab.errors import AttestationError, RuntimeFailureError, RuntimeUnsupportedError, UsageError
from routing_lab.model import ModelFacts
from routing_lab.runtime.base import (
    Attestation,
    Capability,
    DecodeTiming,
    Draft,
    Generation,
    RuntimeBuild,
    RuntimeOptions,
    Verified,
)
from routing_lab.schedule import Schedule

__all__ = ["FakeRuntime"]

_END = 0x110000  # the end-of-generation token: no character has this number

Answer = Callable[[str, Mapping[int, int]], str]
Speed = Callable[[Mapping[int, int]], float]
Fail = Callable[[str, Mapping[int, int]], bool]
Miscount = Callable[[int, int], int]


class FakeRuntime:
    """Answers, decode rates and failures come from callables; a token is one character and time is made up.

    Args:
        facts: The model to stand for.
        answer: The whole completion of a prompt under the counts of a schedule (block -> experts).
        speed: Decode rate in tokens per second under these counts.
        fail: Whether the request named first (``apply``, ``generate``, ``decode_timing``, ``render_chat``) loses the
            process; the next call works again, as the contract asks.
        miscount: The count that attestation finds in a block where the second argument is wanted.
        capability: What this runtime claims to be able to do.
        options: Only ``context_tokens`` matters.
    """

    def __init__(
        self,
        facts: ModelFacts,
        *,
        answer: Answer = lambda _prompt, _counts: "",
        speed: Speed = lambda _counts: 100.0,
        fail: Fail = lambda _request, _counts: False,
        miscount: Miscount = lambda _block, count: count,
        capability: Capability = Capability.PRELOAD,
        options: RuntimeOptions | None = None,
    ) -> None:
        self._facts = facts
        self._answer, self._speed, self._fail, self._miscount = answer, speed, fail, miscount
        self._capability = capability
        self._options = options or RuntimeOptions()
        self._counts: dict[int, int] | None = None

    @property
    def facts(self) -> ModelFacts:
        """Facts of the model this stands for."""
        return self._facts

    @property
    def options(self) -> RuntimeOptions:
        """The options given."""
        return self._options

    @property
    def capability(self) -> Capability:
        """What this runtime claims to be able to do."""
        return self._capability

    @property
    def build(self) -> RuntimeBuild:
        """Says that this is a fake."""
        return RuntimeBuild("fake", "0", "none", "sha256:" + "0" * 64, "no library: a fake for tests")

    def apply(self, schedule: Schedule) -> Attestation:
        """Switch to ``schedule``; see ``base.Runtime.apply``."""
        counts = schedule.resolve(self._facts)
        if self._capability is Capability.UNIFORM_ONLY and len(set(counts.values())) > 1:
            raise RuntimeUnsupportedError(f"schedule {schedule.name} sets counts per block, which this fake cannot do")
        self._maybe_fail("apply", counts)
        found = {block: self._miscount(block, count) for block, count in counts.items()}
        for block, count in counts.items():
            if found[block] != count:
                raise AttestationError(block, count, found[block])
        self._counts = dict(counts)
        return Attestation(selected=found, summed=dict(found))

    def render_chat(self, user: str, *, thinking: bool | None = None) -> str:
        """A chat prompt of no model; see ``base.Runtime.render_chat``."""
        self._maybe_fail("render_chat", self._current())
        return f"user: {user}\nassistant:{' (no thinking)' if thinking is False else ''}"

    def generate(self, prompt: str, *, max_tokens: int, stop: Sequence[str] = (), margins: bool = False) -> Generation:
        """The answer, cut as a real runtime cuts it; see ``base.Runtime.generate``."""
        counts = self._current()
        room = self._options.context_tokens - len(prompt)
        if max_tokens < 1 or "" in stop or not prompt or room < 1:
            raise UsageError("max_tokens must be at least 1, the prompt must fit and no stop string may be empty")
        self._maybe_fail("generate", counts)
        whole = self._answer(prompt, counts)
        text = whole[: min(max_tokens, room)]
        cut = min((at for at in map(text.find, stop) if at >= 0), default=None)
        # The end-of-generation token takes a token of the budget, like any other.
        stopped = cut is not None or len(whole) < min(max_tokens, room)
        tokens = len(text) + stopped if cut is None else cut + 1
        seconds = tokens / self._speed(counts)
        return Generation(
            text=text if cut is None else text[:cut],
            finish_reason="stop" if stopped else "length",
            prompt_tokens=len(prompt),
            tokens=tokens,
            seconds=seconds,
            llama_seconds=seconds,
            smallest_margin=1.0 if margins else None,
            token_ids=tuple(map(ord, whole[:tokens])) + (_END,) * (stopped and cut is None),
            margins=(1.0,) * tokens if margins else None,
        )

    def verify(self, drafts: Sequence[Draft], *, stop: Sequence[str] = (), tie_margin: float = 0.0) -> list[Verified]:
        """As if decoded, at a tenth of the time; its margins are 1; see ``base.Verifier.verify``."""
        if not drafts or not tie_margin >= 0:
            raise UsageError("there are no drafts, or the tie margin is negative")
        self._maybe_fail("verify", self._current())
        verified = []
        for draft in drafts:
            made = self.generate(draft.prompt, max_tokens=draft.max_tokens, stop=stop, margins=True)
            kept = 0
            for wanted, found in zip(draft.tokens, made.token_ids or (), strict=False):
                if wanted != found:
                    break
                kept += 1
            quick = replace(made, seconds=made.seconds / 10, llama_seconds=made.seconds / 10)
            verified.append(Verified(quick, kept, len(draft.tokens), doubtful=tie_margin > 1.0))
        return verified

    def decode_timing(self, *, tokens: int, prompt_tokens: int = 16) -> DecodeTiming:
        """Made-up time from the given rate; see ``base.Runtime.decode_timing``."""
        if tokens < 1 or prompt_tokens < 1 or tokens + prompt_tokens >= self._options.context_tokens:
            raise UsageError("prompt and timed tokens must each be at least 1, and together less than the context")
        counts = self._current()
        self._maybe_fail("decode_timing", counts)
        rate = self._speed(counts)
        return DecodeTiming(tokens=tokens, seconds=tokens / rate, prompt_seconds=prompt_tokens / (10 * rate))

    def close(self) -> None:
        """Nothing to free."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _current(self) -> Mapping[int, int]:
        if self._counts is None:
            self.apply(Schedule.baseline(self._facts))
        assert self._counts is not None, "apply sets it or raises"  # noqa: S101
        return self._counts

    def _maybe_fail(self, request: str, counts: Mapping[int, int]) -> None:
        if self._fail(request, counts):
            raise RuntimeFailureError(f"the fake runtime was told to fail in {request}", "last words of a fake")
