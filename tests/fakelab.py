"""A model that exists only as rules, for tests of everything that runs schedules: which probe needs which block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from routing_lab.model import ModelFacts
from routing_lab.probes import Probe, ProbeSet
from routing_lab.runtime.fake import FakeRuntime
from routing_lab.schedule import Schedule
from routing_lab.space import SearchSpace

BLOCKS = 4
OWN = 8

# Probe -> the least count it needs in a block; a probe that is not listed is answered by every schedule.
NEEDS: dict[str, dict[int, int]] = {"g2": {0: 4}, "g3": {3: 2}, "h1": {1: 4}}


def make_facts(folder: Path, content: bytes = b"a model") -> ModelFacts:
    file = folder / "model.gguf"
    file.write_bytes(content)
    return ModelFacts(
        files=(file,),
        name="rules",
        architecture="qwen3moe",
        blocks=BLOCKS,
        mtp_blocks=(),
        routed_blocks=tuple(range(BLOCKS)),
        dense_blocks=(),
        experts=16,
        experts_used=dict.fromkeys(range(BLOCKS), OWN),
        shared_experts=0,
        embedding_length=64,
        expert_feed_forward_length=64,
        context_length=4096,
        has_chat_template=False,
        quantization="F16",
        parameters=1000,
        size_bytes=len(content),
        block_bytes={},
        other_bytes=0,
    )


def make_probes(gate: int = 4, holdout: int = 4, name: str = "rules") -> ProbeSet:
    items = [Probe(f"g{i}", f"g{i}?", str(i), "integer", "gate") for i in range(gate)]
    items += [Probe(f"h{i}", f"h{i}?", str(i), "integer", "holdout") for i in range(holdout)]
    return ProbeSet(name=name, items=tuple(items), max_tokens=64)


def make_space(counts: tuple[int, ...] = (2, 4, 8)) -> SearchSpace:
    return SearchSpace(counts)


def answer_by(needs: Mapping[str, Mapping[int, int]]) -> Callable[[str, Mapping[int, int]], str]:
    def answer(prompt: str, counts: Mapping[int, int]) -> str:
        probe = prompt.removesuffix("?")
        met = all(counts[block] >= least for block, least in needs.get(probe, {}).items())
        return f"Answer: {probe[1:] if met else 99}"

    return answer


def speed(counts: Mapping[int, int]) -> float:
    """Tokens per second of a machine whose time per token is a fixed part and one for each expert."""
    return 1000 / (8 + sum(counts.values()))


def make_runtime(facts: ModelFacts, needs: Mapping[str, Mapping[int, int]] | None = None, **kwargs: Any) -> FakeRuntime:
    return FakeRuntime(facts, **{"answer": answer_by(NEEDS if needs is None else needs), "speed": speed, **kwargs})


def schedule(*counts: int, name: str = "given") -> Schedule:
    return Schedule.from_counts(name, dict(enumerate(counts)))
