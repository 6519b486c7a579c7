"""``routing-lab model``: what a GGUF file says about itself."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from routing_lab.cli import options
from routing_lab.cli.output import console, fact_table, plain, print_json, size

if TYPE_CHECKING:
    from rich.table import Table

    from routing_lab.model import ModelFacts


def add(commands: options.Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = options.command(
        commands,
        "model",
        run,
        help="show a model's facts: blocks, experts, counts, bytes per block",
        description="Show what the header of a GGUF file says: no weights are read, so it is quick on any size.",
        example="routing-lab model Qwen3-30B-A3B-Q4_K_M.gguf",
    )
    parser.add_argument("model", nargs="?", type=Path, metavar="GGUF", help="default: the demo model")
    parser.add_argument("--digest", action="store_true", help="also read the whole model for its SHA-256 digest")


def run(args: argparse.Namespace) -> int:
    """Print the facts."""
    from routing_lab.model import model_digest

    facts = options.read_facts(args)
    digest = model_digest(facts) if args.digest else None
    label = _label(facts)
    if args.json:
        print_json(plain(facts) | {"schedule_of_copy": label} | ({"digest": digest} if digest else {}))
        return 0
    out = console()
    out.print(_summary(facts, digest, label))
    if facts.is_moe:
        out.print()
        out.print(_blocks(facts))
    return 0


def _label(facts: ModelFacts) -> str | None:
    """What a copy made by ``export --format gguf`` says of the schedule that is its own count now."""
    from routing_lab.export.gguf_copy import LABEL_KEY
    from routing_lab.model.facts import read_shards

    label = read_shards(facts.files[0])[0][1].metadata.get(LABEL_KEY)
    return label if isinstance(label, str) else None


def _summary(facts: ModelFacts, digest: str | None, label: str | None) -> Table:
    from routing_lab.schedule import format_blocks

    rows = {
        "name": facts.name,
        "architecture": facts.architecture,
        "files": f"{len(facts.files)}, {size(facts.size_bytes)}",
        "parameters": f"{facts.parameters / 1e6:,.1f} M, experts in {facts.quantization}",
        "stored blocks": str(facts.blocks),
        "blocks with routed experts": format_blocks(facts.routed_blocks) or "none",
        "dense blocks": format_blocks(facts.dense_blocks) or "none",
        "MTP blocks": format_blocks(facts.mtp_blocks) or "none",
        "experts per block": f"{facts.experts} routed, {facts.shared_experts} shared",
        "context": f"{facts.context_length:,} tokens" if facts.context_length else "not stated",
        "chat template": "yes" if facts.has_chat_template else "no",
    }
    if label is not None:
        rows["copy with schedule"] = label
    if digest:
        rows["digest"] = digest
    return fact_table(rows)


def _blocks(facts: ModelFacts) -> Table:
    """One row per run of blocks that look alike, so that 48 equal blocks take one line."""
    from rich.table import Table

    from routing_lab.schedule import format_blocks

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("blocks")
    for column in ("experts used", "routed experts", "shared experts", "router", "attention and rest"):
        table.add_column(column, justify="right")
    alike: dict[tuple[str, str, str, str, str], list[int]] = {}
    for block, part in facts.block_bytes.items():
        row = (
            str(facts.experts_used.get(block, "-")),
            size(part.routed_experts),
            size(part.shared_experts),
            size(part.router),
            size(part.other),
        )
        alike.setdefault(row, []).append(block)
    for row, blocks in alike.items():
        table.add_row(format_blocks(blocks), *row)
    return table
