from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

import pytest
from contract import RuntimeContract
from verifying import VerifierContract

from routing_lab.errors import AttestationError, RuntimeUnsupportedError
from routing_lab.model import ModelFacts
from routing_lab.runtime import Capability, RuntimeOptions
from routing_lab.runtime.fake import FakeRuntime
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.schedule import Schedule


@pytest.mark.model
class TestLlamaRuntime(RuntimeContract, VerifierContract):
    @pytest.fixture
    def lose_process(self, runtime: LlamaRuntime) -> Callable[[], None]:
        return lambda: os.kill(runtime.process_id, signal.SIGKILL)


class TestFakeRuntime(RuntimeContract, VerifierContract):
    @pytest.fixture
    def broken(self) -> list[str]:
        return []

    @pytest.fixture
    def runtime(self, facts: ModelFacts, broken: list[str]) -> FakeRuntime:
        def answer(prompt: str, counts: Mapping[int, int]) -> str:
            return f"the counts add up to {sum(counts.values())}, and {prompt} is a question"

        def fail(request: str, _counts: Mapping[int, int]) -> bool:
            return bool(broken) and broken.pop() is not None

        return FakeRuntime(facts, answer=answer, fail=fail, options=RuntimeOptions(context_tokens=1024))

    @pytest.fixture
    def lose_process(self, broken: list[str]) -> Callable[[], None]:
        return lambda: broken.append("once")


def test_the_fake_decodes_at_the_rate_it_is_given(facts: ModelFacts) -> None:
    fake = FakeRuntime(facts, speed=lambda counts: 1000 / sum(counts.values()))
    fake.apply(Schedule.uniform(1, facts))
    assert fake.decode_timing(tokens=50).tokens_per_s == pytest.approx(1000 / len(facts.routed_blocks))


def test_the_fake_names_itself_one(facts: ModelFacts) -> None:
    assert FakeRuntime(facts).build.name == "fake"


def test_the_fake_can_fail_attestation(facts: ModelFacts) -> None:
    fake = FakeRuntime(facts, miscount=lambda block, count: count + (block == facts.routed_blocks[-1]))
    with pytest.raises(AttestationError) as caught:
        fake.apply(Schedule.uniform(1, facts))
    assert (caught.value.block, caught.value.wanted, caught.value.got) == (facts.routed_blocks[-1], 1, 2)


def test_the_fake_can_refuse_mixed_schedules(facts: ModelFacts, mixed: Schedule) -> None:
    fake = FakeRuntime(facts, capability=Capability.UNIFORM_ONLY)
    fake.apply(Schedule.uniform(2, facts))
    with pytest.raises(RuntimeUnsupportedError):
        fake.apply(mixed)
