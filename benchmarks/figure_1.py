"""The speed column of figure 1, on a model of random weights in the shape of the one that was studied.

What: the nine schedules of ``schedules/figure-1`` against the baseline of a ``qwen35moe`` of 41 stored blocks with 256
experts, 8 used. Weights are random (``routing_lab.synth``): a decode costs what the shape costs, and there are no
answers to judge. ``--gib`` sets the size; embedding, experts, heads and vocabulary shrink by one factor, so that the
consulted experts keep about their share of what a token reads (31 % at 4 GiB, 33 % in the full shape, 24 % at 0.3 GiB).
The file is made once and used again.

Warm-up: one round of all schedules is thrown away, which also brings the weights into memory. Repeats: in each round
every schedule decodes once, the order turned around from round to round; reported is the Hodges-Lehmann centre of the
rounds' ratios and its signed-rank interval (see ``routing_lab.measure``).

The ceiling: a token reads the weights of the experts it consults and all others once. If reading were everything,
decoding would speed up as those bytes shrink, which is the column "by bytes". Beside it stand the published rates,
divided by the published one of the baseline: another machine, with part of the experts on a GPU of 12 GB.

Run it on a quiet machine, with a model that is much larger than the caches of its cores.

    python benchmarks/figure_1.py --gib 4
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routing_lab.errors import RoutingLabError, UsageError
from routing_lab.measure import MeasureSettings, SpeedRatio, measure_many
from routing_lab.model import ModelFacts
from routing_lab.runtime import RuntimeOptions
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.schedule import Schedule
from routing_lab.synth import QWEN35_35B_A3B, Shape, model_name, weight_bytes, write_model

ROOT = Path(__file__).parent.parent
TYPE, SEED = "q4_0", 1
WIDTH_STEPS = QWEN35_35B_A3B.embedding_length // 32


@dataclass(frozen=True, slots=True)
class Row:
    """One schedule; the last two are ratios of what was published and of bytes read, ``None`` where not published."""

    schedule: Schedule
    experts: int
    speed: SpeedRatio
    by_bytes: float
    published: float | None


def shape_of(gib: float) -> Shape:
    """The shape whose weights come closest to ``gib`` GiB."""
    steps = [step / WIDTH_STEPS for step in range(1, 2 * WIDTH_STEPS + 1)]
    full = QWEN35_35B_A3B.vocabulary
    shapes = [QWEN35_35B_A3B.scaled(width=width, vocabulary=max(512, int(full * width))) for width in steps]
    return min(shapes, key=lambda shape: abs(weight_bytes(shape, TYPE) - gib * 2**30))


def prepare(path: Path, shape: Shape) -> None:
    """Make the model unless it is there already."""
    wanted = model_name(shape, TYPE, SEED)
    if path.exists():
        if (found := ModelFacts.read(path).name) != wanted:
            raise UsageError(f"{path} is {found!r}, not {wanted!r}; delete it, or name another file with --model")
        return
    print(f"writing {path}: {wanted}, {weight_bytes(shape, TYPE) / 2**30:.2f} GiB", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_model(path, shape, TYPE, SEED)


def bytes_per_token(facts: ModelFacts, schedule: Schedule) -> float:
    """Bytes of weights that one token of the main pass reads under ``schedule``."""
    total = facts.other_bytes / 2  # the output matrix; of the embedding, which is as large, a token reads one row
    for block, count in schedule.resolve(facts).items():
        part = facts.block_bytes[block]
        total += part.total - part.routed_experts * (1 - count / facts.experts)
    return total


def rows(runtime: LlamaRuntime, schedules: list[Schedule], settings: MeasureSettings) -> list[Row]:
    """Measure every schedule against the model's own counts."""
    facts, baseline = runtime.facts, Schedule.baseline(runtime.facts)
    own = baseline.resolve(facts)
    published = {one.name: one.source.decode_tokens_per_s for one in schedules if one.source}
    reference = next((published.get(one.name) for one in schedules if one.resolve(facts) == own), None)
    speeds = measure_many(runtime, schedules, baseline, settings)
    result = []
    for schedule, speed in zip(schedules, speeds, strict=True):
        rate = published.get(schedule.name)
        result.append(
            Row(
                schedule=schedule,
                experts=sum(schedule.resolve(facts).values()),
                speed=speed,
                by_bytes=bytes_per_token(facts, baseline) / bytes_per_token(facts, schedule),
                published=rate / reference if rate and reference else None,
            )
        )
    return result


def report(result: list[Row]) -> None:
    """Print the table."""
    print(f"{'schedule':24} {'experts':>7}  {'ratio [95 %]':22} {'by bytes':>8} {'published':>9}")
    for row in result:
        speed = row.speed
        ratio = f"{speed.ratio:.3f} [{speed.low:.3f}, {speed.high:.3f}]"
        published = f"{row.published:9.3f}" if row.published else f"{'':9}"
        print(f"{row.schedule.name:24} {row.experts:7}  {ratio:22} {row.by_bytes:8.3f} {published}")


def as_json(result: list[Row], facts: dict[str, Any]) -> str:
    """Everything, for a program."""
    table = [
        {
            "schedule": row.schedule.name,
            "experts": row.experts,
            "speed": row.speed.to_dict(),
            "by_bytes": row.by_bytes,
            "published": row.published,
        }
        for row in result
    ]
    return json.dumps({**facts, "rows": table}, indent=1)


def run(arguments: argparse.Namespace) -> None:
    """Make the model, measure, print."""
    shape = shape_of(arguments.gib)
    path = arguments.model or ROOT / "runs" / f"figure-1-{arguments.gib:g}gib.gguf"
    schedules = [Schedule.load(file) for file in sorted((ROOT / "schedules" / "figure-1").glob("*.yaml"))]
    settings = MeasureSettings(tokens=arguments.tokens, rounds=arguments.rounds)
    prepare(path, shape)
    with LlamaRuntime(path, RuntimeOptions(threads=arguments.threads, context_tokens=1024)) as runtime:
        result = rows(runtime, schedules, settings)
        facts = {
            "model": runtime.facts.name,
            "size_gib": round(runtime.facts.size_bytes / 2**30, 2),
            "read_per_token_mib": round(bytes_per_token(runtime.facts, Schedule.baseline(runtime.facts)) / 2**20, 1),
            "baseline_tokens_per_s": round(result[0].speed.baseline_tokens_per_s, 1),
            "rounds": settings.rounds,
            "tokens_per_round": settings.tokens,
            "threads": runtime.options.threads,
            "library": runtime.build.version,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        }
    if arguments.json:
        print(as_json(result, facts))
        return
    for name, value in facts.items():
        print(f"{name.replace('_', ' ')}: {value}")
    report(result)


def main() -> None:
    """Print the table, and beside each ratio the published one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the model (default: 4)")
    parser.add_argument("--model", type=Path, help="where it is kept (default: runs/figure-1-<size>gib.gguf)")
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--rounds", type=int, default=12, help="that count (default: 12)")
    parser.add_argument("--tokens", type=int, default=64, help="per round and schedule (default: 64)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    try:
        run(arguments)
    except (RoutingLabError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
