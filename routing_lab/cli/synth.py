"""``routing-lab synth``: a model of random weights in the shape of a published one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from routing_lab.cli import options
from routing_lab.cli.files import check_output
from routing_lab.cli.output import console, fact_table, print_json, progress_console, size
from routing_lab.interrupts import unwinding

if TYPE_CHECKING:
    from routing_lab.synth import Shape

# Spelt out here, so that --help need not load what writes a model; a test compares.
SHAPES = ("qwen3moe-30b-a3b", "qwen35moe-35b-a3b", "deepseek2-v2-lite", "nemotron-h-moe-30b-a3b")
TYPES = ("q4_0", "q8_0")


def add(commands: options.Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = options.command(
        commands,
        "synth",
        run,
        help="write a model of random weights in a published shape, for speed work",
        description=(
            "Write a GGUF of random weights in the shape of a published model: it decodes at that shape's speed and\n"
            "answers nothing. The pattern of blocks (dense, linear attention, MTP) is kept at every size."
        ),
        example="routing-lab synth --shape qwen3moe-30b-a3b --blocks 12 --width 0.5 --experts 64 -o big.gguf",
    )
    parser.add_argument("--shape", choices=SHAPES, required=True, help="whose shape: %(choices)s", metavar="NAME")
    parser.add_argument("--blocks", type=options.positive, metavar="N", help="stored blocks (default: the model's own)")
    parser.add_argument(
        "--width",
        type=options.positive_number,
        default=1.0,
        metavar="FACTOR",
        help="multiplies lengths and numbers of heads (default: 1)",
    )
    parser.add_argument("--experts", type=options.positive, metavar="N", help="per block (default: the model's own)")
    parser.add_argument("--vocabulary", type=options.positive, metavar="N", help="tokens (default: the model's own)")
    parser.add_argument("--type", choices=TYPES, default="q4_0", help="of all matrices (default: %(default)s)")
    parser.add_argument(
        "--seed", type=options.non_negative, default=1, metavar="N", help="same seed, same bytes (default: 1)"
    )
    parser.add_argument("--plan", action="store_true", help="only say how large it would become")
    parser.add_argument("-o", "--output", type=Path, metavar="GGUF", help="file to write")


def run(args: argparse.Namespace) -> int:
    """Say what will be written, and write it.

    Raises:
        UsageError: No output is named, the sizes make no model, or the disk has not enough room.
    """
    from routing_lab import synth
    from routing_lab.errors import UsageError

    shape = synth.SHAPES[args.shape].scaled(
        blocks=args.blocks, width=args.width, experts=args.experts, vocabulary=args.vocabulary
    )
    if args.output is None and not args.plan:
        raise UsageError("say where to write the model with -o FILE, or only ask for its size with --plan")
    size_bytes = synth.weight_bytes(shape, args.type)
    if not args.plan:
        check_output(args.output)
        synth.check_room(args.output, shape, args.type)
    if not args.json:
        console().print(fact_table(_summary(shape, args, size_bytes)))
    if not args.plan:
        _write(args, shape, size_bytes)
    if args.json:
        print_json(_fields(shape, args, size_bytes))
    return 0


def _write(args: argparse.Namespace, shape: Shape, size_bytes: int) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from routing_lab.synth import write_model

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    # Unwinding removes what was written of it: gigabytes that nobody would look for.
    with unwinding(), Progress(*columns, console=progress_console(), transient=True) as progress:
        task = progress.add_task("", total=size_bytes)
        write_model(args.output, shape, args.type, args.seed, on_progress=lambda count: progress.advance(task, count))


def _summary(shape: Shape, args: argparse.Namespace, size_bytes: int) -> dict[str, str]:
    rows = {
        "shape of": shape.source,
        "architecture": shape.architecture,
        "blocks": f"{shape.blocks} stored, {shape.dense_blocks} dense, {shape.mtp_blocks} for drafting (MTP)",
        "experts per block": f"{shape.experts}, {shape.experts_used} used",
        "embedding": f"{shape.embedding_length}, experts {shape.expert_length} wide",
        "vocabulary": f"{shape.vocabulary:,} tokens",
        "parameters": f"{shape.parameters / 1e6:,.1f} M, {shape.active_parameters / 1e6:,.1f} M behind a token",
        "weights": f"{size(size_bytes)} in {args.type}",
    }
    return rows if args.plan else {**rows, "file": str(args.output)}


def _fields(shape: Shape, args: argparse.Namespace, size_bytes: int) -> dict[str, object]:
    return {
        "file": None if args.plan else args.output,
        "weight_bytes": size_bytes,
        "type": args.type,
        "seed": args.seed,
        "architecture": shape.architecture,
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "shape": shape,
    }
