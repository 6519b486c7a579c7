"""Each architecture in real llama.cpp: it loads, its schedules are attested, and they compute what they should."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tiny import TINY

from routing_lab.model import ModelFacts
from routing_lab.runtime import Capability, RuntimeOptions
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.schedule import Schedule
from routing_lab.synth import QWEN35_35B_A3B, write_model

pytestmark = pytest.mark.model

PROMPTS = ("7", "Pack my box with five dozen liquor jugs", "Größe: 3 µm, naïve? 你好")
FIGURE_1 = sorted((Path(__file__).parent.parent.parent / "schedules" / "figure-1").glob("*.yaml"))
OPTIONS = RuntimeOptions(threads=1, context_tokens=256, batch_tokens=16)
STOCK = RuntimeOptions(threads=1, context_tokens=256, batch_tokens=16, override="off")


class Pair(NamedTuple):
    """The same model with and without the override library."""

    runtime: LlamaRuntime
    stock: LlamaRuntime

    @property
    def facts(self) -> ModelFacts:
        return self.runtime.facts


@pytest.fixture(scope="module", params=[*((name, "q4_0") for name in TINY), ("qwen3moe", "q8_0")], ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    name, kind = request.param
    path = tmp_path_factory.mktemp("synth") / f"{name}.gguf"
    write_model(path, TINY[name], kind)
    with LlamaRuntime(path, OPTIONS) as runtime, LlamaRuntime(path, STOCK) as stock:
        yield Pair(runtime, stock)


def logits(runtime: LlamaRuntime, prompt: str) -> np.ndarray:
    return np.frombuffer(runtime.logits(prompt), np.float32)


def test_a_mixed_schedule_is_attested_block_by_block(pair: Pair) -> None:
    facts = pair.facts
    steps = (1, facts.experts, 3, facts.experts - 1, 2)
    counts = {block: steps[index % len(steps)] for index, block in enumerate(facts.routed_blocks)}
    attestation = pair.runtime.apply(Schedule.from_counts("mixed", counts))
    assert pair.runtime.capability is Capability.PRELOAD
    assert dict(attestation.selected) == dict(attestation.summed) == counts


def test_every_block_that_is_scheduled_matters_and_no_other_one_is_routed(pair: Pair) -> None:
    """Where a count were attested and not computed with, a block would give the logits of the baseline."""
    baseline = pair.runtime.apply(Schedule.baseline(pair.facts))
    assert tuple(baseline.selected) == pair.facts.routed_blocks
    seen = {pair.runtime.logits(PROMPTS[1])}
    for block in pair.facts.routed_blocks:
        pair.runtime.apply(Schedule.from_counts("one", {block: 1}))
        seen.add(pair.runtime.logits(PROMPTS[1]))
    assert len(seen) == 1 + len(pair.facts.routed_blocks)


def test_a_uniform_count_has_the_very_logits_of_the_stock_scalar_override(pair: Pair) -> None:
    counts = {1, 3, pair.facts.uniform_experts_used, pair.facts.experts}
    different = set()
    for count in counts:
        schedule = Schedule.uniform(count, pair.facts)
        pair.runtime.apply(schedule)
        pair.stock.apply(schedule)
        for prompt in PROMPTS:
            own = pair.runtime.logits(prompt)
            assert own == pair.stock.logits(prompt), f"{count} experts, prompt {prompt!r}"
            different.add(own)
    assert len(different) == len(counts) * len(PROMPTS)


def test_logits_are_finite_spread_and_depend_on_the_prompt(pair: Pair) -> None:
    pair.runtime.apply(Schedule.baseline(pair.facts))
    rows = [logits(pair.runtime, prompt) for prompt in PROMPTS]
    for row in rows:
        assert np.isfinite(row).all()
        assert 0.5 < row.std() < 2, "the output matrix keeps the size of what it is multiplied with"
    apart = np.corrcoef(rows)[~np.eye(len(rows), dtype=bool)]
    assert apart.max() < 0.9, "prompts that all look alike to the model would route alike"


def test_it_times_generates_and_renders_a_chat(pair: Pair) -> None:
    pair.runtime.apply(Schedule.uniform(2, pair.facts))
    timing = pair.runtime.decode_timing(tokens=20)
    assert timing.tokens == 20
    assert timing.seconds > 0
    generation = pair.runtime.generate(PROMPTS[2], max_tokens=4)
    assert generation.prompt_tokens == len(PROMPTS[2].encode()), "a token for each byte"
    assert 1 <= generation.tokens <= 4
    assert pair.runtime.render_chat("Hi") == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    marked = pair.runtime.generate("<|im_start|>user", max_tokens=1)
    assert marked.prompt_tokens == 5, "a mark is one token"


def test_the_schedules_of_figure_1_fit_a_scaled_model_of_that_shape_and_are_attested(tmp_path: Path) -> None:
    path = tmp_path / "figure-1.gguf"
    write_model(path, QWEN35_35B_A3B.scaled(width=1 / 64, vocabulary=512))
    schedules = [Schedule.load(file) for file in FIGURE_1]
    assert len(schedules) == 9
    with LlamaRuntime(path, OPTIONS) as runtime:
        assert runtime.facts.routed_blocks == tuple(range(40))
        for schedule in schedules:
            counts = schedule.resolve(runtime.facts)
            assert dict(runtime.apply(schedule).selected) == counts
