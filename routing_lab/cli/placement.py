"""``routing-lab placement``: plan where a model lives, and measure where it runs best."""

from __future__ import annotations

import argparse
import csv
import io
import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from routing_lab.cli import options
from routing_lab.cli.drawing import check_figure, drawn, require_libraries
from routing_lab.cli.files import check_outputs, write_output
from routing_lab.cli.output import activity, console, plain, print_json, progress_console, say, say_error, shown, size
from routing_lab.errors import InterruptedStudyError, RuntimeUnsupportedError, UsageError, UserFileError
from routing_lab.interrupts import unwinding

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.table import Table

    from routing_lab.model import ModelFacts, ModelMemory
    from routing_lab.placement import Placement
    from routing_lab.placement.plan import KvType, Plan, TradeRow
    from routing_lab.placement.published import PublishedTable
    from routing_lab.placement.sweep import Choice, SweepRow, SweepSettings
    from routing_lab.runtime.llama import LlamaRuntime

_FIRST_CONTEXT = 2048
_LAST_CONTEXT = 1 << 18
_MOST_GIB = 1 << 20


def add(commands: options.Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command and its actions."""
    actions = options.group(
        commands, "placement", help="plan where weights live, and measure placements"
    ).add_subparsers(title="actions", metavar="ACTION", required=True)
    _add_plan(actions)
    _add_sweep(actions)


# ---------------------------------------------------------------------------------------------------------------------
# plan


def _add_plan(actions: options.Subparsers[argparse.ArgumentParser]) -> None:
    parser = options.command(
        actions,
        "plan",
        run_plan,
        help="say from the file alone what fits a device and a host, and suggest a placement",
        description="Add up weights, caches and an estimate of the compute buffers from the header of a GGUF, and\n"
        "suggest the placement with the fewest blocks' experts in host memory. Nothing is loaded.",
        example="routing-lab placement plan --model big.gguf --device-gib 12 --host-gib 32 --context 16384 -o big.yaml",
    )
    options.add_model(parser)
    parser.add_argument(
        "--device-gib", type=options.positive_number, required=True, metavar="X", help="memory of the device"
    )
    parser.add_argument(
        "--host-gib", type=options.positive_number, metavar="Y", help="memory of the host (default: this machine's)"
    )
    parser.add_argument(
        "--spare-gib",
        type=options.non_negative_number,
        default=0.5,
        metavar="X",
        help="left free on the device for its driver and a screen (default: %(default)s)",
    )
    parser.add_argument(
        "--context", type=options.positive, metavar="N", help="tokens (default: the placement's, else 4096)"
    )
    parser.add_argument("--batch", type=options.positive, default=512, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--kv-type", choices=("f16", "f32", "q8_0"), default="f16", help="type of the KV cache (default: %(default)s)"
    )
    parser.add_argument("--placement", type=Path, metavar="YAML", help="add up this placement instead of a suggestion")
    parser.add_argument("-o", "--output", type=Path, metavar="YAML", help="write the placement to this file")


def run_plan(args: argparse.Namespace) -> int:
    """Print both sides of the placement, what is wrong with it, and context against blocks."""
    from routing_lab.model import ModelMemory
    from routing_lab.placement import Placement
    from routing_lab.placement.plan import GIB, Limits, plan, suggest, trade

    check_outputs(args)
    _require_sane(args)
    given = None if args.placement is None else Placement.load(args.placement)
    memory = ModelMemory.read(options.model_path(args))
    if given is not None:
        options.require_fit(given, args.placement, memory.facts)
    limits = Limits(
        device_bytes=round(args.device_gib * GIB),
        host_bytes=_host_memory() if args.host_gib is None else round(args.host_gib * GIB),
        device_spare_bytes=round(args.spare_gib * GIB),
    )
    context = args.context or (given.context_tokens if given else None) or options.CONTEXT
    kv_type: KvType = args.kv_type
    if given is None:
        result = suggest(memory, limits, context_tokens=context, batch_tokens=args.batch, kv_type=kv_type)
    else:
        result = plan(memory, given, limits, context_tokens=context, batch_tokens=args.batch, kv_type=kv_type)
    rows = trade(memory, limits, _contexts(memory, context), batch_tokens=args.batch, kv_type=kv_type)
    if args.output is not None:
        write_output(args.output, result.placement.to_yaml().encode())
    if args.json:
        print_json(_plan_fields(result, rows, memory))
    else:
        _print_plan(result, rows, memory, suggested=given is None)
        if args.output is not None:
            say(f"written: {args.output}")
    return 0


def _require_sane(args: argparse.Namespace) -> None:
    """Refuse what no machine has. Raises ``UsageError``."""
    from routing_lab.placement import MAX_CONTEXT

    for option, value, most in (
        ("--device-gib", args.device_gib, _MOST_GIB),
        ("--host-gib", args.host_gib or 0, _MOST_GIB),
        ("--spare-gib", args.spare_gib, _MOST_GIB),
        ("--context", args.context or 0, MAX_CONTEXT),
        ("--batch", args.batch, MAX_CONTEXT),
    ):
        if value > most:
            raise UsageError(f"{option} is {value:g}; more than {most:,} cannot be planned")


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _contexts(memory: ModelMemory, asked: int) -> list[int]:
    last = min(memory.facts.context_length or _LAST_CONTEXT, _LAST_CONTEXT)
    powers = {1 << n for n in range(_FIRST_CONTEXT.bit_length() - 1, _LAST_CONTEXT.bit_length())}
    return sorted({asked, *(tokens for tokens in powers if tokens <= last)})


def _plan_fields(result: Plan, rows: list[TradeRow], memory: ModelMemory) -> dict[str, object]:
    from routing_lab.placement.plan import kinds_of_blocks

    sides = {
        name: {
            "weights": plain(side.weights),
            "weight_bytes": side.weight_bytes,
            "cache_bytes": side.cache_bytes,
            "compute_bytes_estimate": side.compute_bytes,
            "total_bytes": side.total_bytes,
        }
        for name, side in (("device", result.device), ("host", result.host))
    }
    return {
        "placement": plain(result.placement),
        "flags": result.placement.to_flags(short=True),
        "context_tokens": result.context_tokens,
        "batch_tokens": result.batch_tokens,
        "kv_type": result.kv_type,
        **sides,
        "limits": plain(result.limits),
        "fits_device": result.fits_device,
        "fits_host": result.fits_host,
        "warnings": list(result.warnings),
        "notes": list(result.notes),
        "blocks": {
            str(block): {"weights": kinds, "cache": plain(memory.caches[block])}
            for block, kinds in kinds_of_blocks(memory).items()
        },
        "trade": plain(rows),
    }


def _print_plan(result: Plan, rows: list[TradeRow], memory: ModelMemory, *, suggested: bool) -> None:
    out, layers = console(), memory.facts.blocks + 1
    out.print(_block_table(memory, result))
    out.print()
    name = result.placement.name or "placement"
    out.print(shown(f"{name}: {result.placement.describe(layers)}"), soft_wrap=True)
    # In one piece and quoted for a shell: it is there to be pasted.
    out.print(shown(f"flags: {shlex.join(result.placement.to_flags(short=True))}"), soft_wrap=True)
    out.print()
    out.print(_sides_table(result))
    for line in (*(f"warning: {text}" for text in result.warnings), *(f"note: {text}" for text in result.notes)):
        out.print(shown(line))
    out.print()
    out.print(_trade_table(rows, result.limits.device_usable_bytes, suggested=suggested))


def _block_table(memory: ModelMemory, result: Plan) -> Table:
    """Weights and cache of each run of blocks that are alike, in MiB."""
    from rich.table import Table

    from routing_lab.model import format_blocks
    from routing_lab.placement.plan import KINDS, kinds_of_blocks

    alike: dict[tuple[tuple[tuple[str, int], ...], int], list[int]] = {}
    for block, sizes in kinds_of_blocks(memory).items():
        cached = memory.cache_bytes(block, result.context_tokens, result.batch_tokens, result.element_bytes)
        alike.setdefault((tuple(sizes.items()), cached), []).append(block)
    shown = [kind for kind in KINDS if any(kind in dict(kinds) for kinds, _ in alike)]
    table = Table(title="each block, MiB", title_justify="left", box=None, pad_edge=False, collapse_padding=True)
    table.add_column("\nblocks", min_width=12)
    for name in (*shown, "cache"):
        # Only the list of blocks wraps: a narrow terminal would cut a number short.
        heading = name.replace("_", "\n") if "_" in name else f"\n{name}"
        table.add_column(heading, justify="right", no_wrap=True)
    for (kinds, cached), blocks in alike.items():
        cells = [_mebibytes(dict(kinds).get(kind, 0)) for kind in shown]
        table.add_row(format_blocks(blocks).replace(",", ", "), *cells, _mebibytes(cached))
    return table


def _sides_table(result: Plan) -> Table:
    """What both sides hold, line by line, and what of their memory is usable for it."""
    from rich.table import Table

    device, host, limits = result.device, result.host, result.limits
    table = Table(f"context {result.context_tokens:,}", box=None, pad_edge=False)
    table.add_column("device", justify="right")
    table.add_column("host", justify="right")
    for name, *sizes in (
        ("weights", device.weight_bytes, host.weight_bytes),
        ("caches", device.cache_bytes, host.cache_bytes),
        ("compute (estimate)", device.compute_bytes, host.compute_bytes),
        ("together", device.total_bytes, host.total_bytes),
        ("there is", limits.device_bytes, limits.host_bytes),
        ("kept free", limits.device_spare_bytes, limits.host_spare_bytes),
        ("usable", limits.device_usable_bytes, limits.host_usable_bytes),
    ):
        table.add_row(name, *("-" if bytes_there is None else size(bytes_there) for bytes_there in sizes))
    table.add_row("fits", *("yes" if fits else "NO" for fits in (result.fits_device, result.fits_host)))
    return table


def _trade_table(rows: list[TradeRow], usable: int | None, *, suggested: bool) -> Table:
    """Suggestions for other contexts, whatever placement the plan above is for."""
    from rich.table import Table

    room = "" if usable is None else f" ({size(usable)} usable on the device)"
    title = f"context against blocks{room}"
    if not suggested:
        title = f"not the placement above, but those that would be suggested: {title}"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="italic")
    for name in ("context", "blocks with experts on the host", "device", "host"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(f"{row.context_tokens:,}", _moved(row), size(row.device_bytes), size(row.host_bytes))
    return table


def _moved(row: TradeRow) -> str:
    if row.host_blocks is not None:
        return str(row.host_blocks)
    if not row.device_bytes:
        return "everything"
    return f"all, and {row.host_layers} whole {'layers' if row.host_layers > 1 else 'layer'}"


def _mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.2f}" if size_bytes else "-"


# ---------------------------------------------------------------------------------------------------------------------
# sweep


def _add_sweep(actions: options.Subparsers[argparse.ArgumentParser]) -> None:
    parser = options.command(
        actions,
        "sweep",
        run_sweep,
        help="measure placements in turns: decode rate, memory on both sides, page faults, swap",
        description="Measure two ways of moving weights to the host, in common rounds: the experts of some blocks,\n"
        "and whole layers. Every turn loads the model anew unless --keep-loaded is given.\n"
        "Chosen is the fastest, or of those equal to it within the interval the one that takes least of the device.",
        example="routing-lab placement sweep --model big.gguf --blocks 0,8,16,33-40 --layers 0,20,41 --csv sweep.csv",
    )
    options.add_model(parser)
    parser.add_argument(
        "--blocks",
        metavar="LIST",
        help="experts on the host, all layers on the device: of the first N blocks each, or of ranges such as 33-40",
    )
    parser.add_argument("--layers", metavar="LIST", help="whole layers on the device, as --gpu-layers counts them")
    parser.add_argument("--tokens", type=options.positive, default=64, metavar="N", help="default: %(default)s")
    rounds = options.whole(1, options.MOST_ROUNDS)
    parser.add_argument("--rounds", type=rounds, default=6, metavar="N", help="default: %(default)s")
    parser.add_argument("--keep-loaded", action="store_true", help="load every placement once and keep all in memory")
    parser.add_argument(
        "--csv",
        type=Path,
        metavar="FILE",
        help="write the table to this file, after every round; replaces one that is there",
    )
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf (needs matplotlib)")
    parser.add_argument(
        "--beside", type=Path, action="append", default=[], metavar="YAML", help="a published table to print below"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="YAML", help="write the chosen placement to this file")
    options.add_runtime(parser, placement=False, server=False)


def run_sweep(args: argparse.Namespace) -> int:
    """Measure, and print one row per placement, and which one is chosen."""
    from routing_lab.placement.published import PublishedTable
    from routing_lab.placement.sweep import Choice, distinct

    check_figure(args.figure)
    require_libraries(matplotlib=args.figure)
    check_outputs(args)
    _require_one_load(args)
    tables = [PublishedTable.load(path) for path in args.beside]
    facts = options.read_facts(args)
    options.require_context(args, facts)
    placements, left_out = distinct(_placements(args, facts))
    settings = _sweep_settings(args)
    if args.csv is not None and args.csv.is_file():
        _say_aside(f"{args.csv} is replaced after the first round: a sweep begins anew, its table holds no rounds")
    rows = _swept(args, placements, settings)
    choice = Choice.of(rows, settings.confidence)
    if args.json:
        print_json(_sweep_fields(rows, choice, left_out, tables))
    else:
        _print_sweep(rows, choice, left_out, tables)
    # Only now: where the rest fails, what was measured is on the screen at least.
    if choice is None:
        return say_error(RuntimeUnsupportedError(f"no placement ran; the first one: {rows[0].error}"))
    try:
        _write_results(args, rows, choice)
    except UserFileError as error:
        return say_error(error)
    return 0


def _say_aside(text: str) -> None:
    """On stderr, where it is not taken for a result."""
    progress_console().print(shown(text), soft_wrap=True)


def _sweep_fields(
    rows: Sequence[SweepRow], choice: Choice | None, left_out: list[str], tables: Sequence[PublishedTable]
) -> dict[str, object]:
    return {
        "placements": [row.to_dict() for row in rows],
        "chosen": choice and choice.chosen.title,
        "fastest": choice and choice.fastest.title,
        "equal_within_interval": [row.title for row in choice.equal] if choice else [],
        "notes": left_out,
        "published": plain(tables),
    }


def _print_sweep(
    rows: Sequence[SweepRow], choice: Choice | None, left_out: list[str], tables: Sequence[PublishedTable]
) -> None:
    from routing_lab.report import memory_table, published_table, sweep_table

    out = console()
    out.print(sweep_table(rows))
    for row in rows:
        if row.error is not None:
            out.print(shown(f"failed: {row.title}: {row.error.splitlines()[0] if row.error else 'no reason given'}"))
    if choice is not None:
        out.print()
        out.print(memory_table(rows))
        out.print()
        out.print(shown(f"chosen: {choice.describe()}"))
    for line in left_out:
        out.print(shown(f"note: {line}"))
    for table in tables:
        out.print()
        out.print(published_table(table))


def _require_one_load(args: argparse.Namespace) -> None:
    """Refuse what an RPC server cannot do. Raises ``UsageError``."""
    if args.keep_loaded and args.rpc:
        raise UsageError("--keep-loaded does not work with --rpc: an RPC server serves one loaded model at a time")


def _sweep_settings(args: argparse.Namespace) -> SweepSettings:
    from routing_lab.placement.sweep import SweepSettings

    try:
        settings = SweepSettings(tokens=args.tokens, rounds=args.rounds, keep_loaded=args.keep_loaded)
    except ValueError as error:
        raise UsageError(f"--rounds: {error}") from error
    needed = settings.prompt_tokens + max(settings.tokens, settings.warmup_tokens)
    if needed > args.context:
        raise UsageError(
            f"--context {args.context} is less than the {needed} tokens of a turn (prompt, and warm-up or --tokens): "
            "give fewer tokens or more context"
        )
    return settings


def _swept(args: argparse.Namespace, placements: list[Placement], settings: SweepSettings) -> list[SweepRow]:
    """Every row. Raises ``InterruptedStudyError`` after Ctrl-C, which says what is kept."""
    from routing_lab.placement.sweep import sweep

    done = 0

    def keep(rows: list[SweepRow]) -> None:
        nonlocal done
        done += 1
        if args.csv is not None:
            with suppress(UserFileError):  # it may work again at the end, and is said there
                write_output(args.csv, _csv(rows).encode())

    try:
        with unwinding(), activity("loading the model") as say_doing:
            return sweep(_opener(args), placements, settings, on_progress=say_doing, on_round=keep)
    except KeyboardInterrupt:
        kept = f"{args.csv} holds them" if args.csv is not None else "--csv FILE would have kept them"
        raise InterruptedStudyError(f"interrupted after {done} of {settings.rounds} rounds; {kept}") from None


def _placements(args: argparse.Namespace, facts: ModelFacts) -> list[Placement]:
    from routing_lab.placement.sweep import expert_placements, layer_placements

    blocks, layers = args.blocks, args.layers
    if blocks is None and layers is None:
        stored, most = len([b for b in facts.blocks_with_experts if b not in facts.mtp_blocks]), facts.blocks + 1
        blocks = ",".join(str(n) for n in _quarters(stored))
        layers = ",".join(str(n) for n in _quarters(most)[:-1])
    found = expert_placements(facts, blocks.split(",")) if blocks else []
    try:
        counts = [options.non_negative(text) for text in layers.split(",")] if layers else []
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--layers {error}") from None
    found += layer_placements(facts, counts)
    for placement in found:
        placement.check(facts)
    return found


def _quarters(most: int) -> list[int]:
    return sorted({most * part // 4 for part in range(5)})


def _opener(args: argparse.Namespace) -> Callable[[Placement], LlamaRuntime]:
    from dataclasses import replace

    from routing_lab.runtime.llama import LlamaRuntime

    base = options.runtime_options(args)
    return lambda placement: LlamaRuntime(options.model_path(args), replace(base, placement=placement))


def _write_results(args: argparse.Namespace, rows: Sequence[SweepRow], choice: Choice) -> None:
    """Write the files that were asked for, and say which they are."""
    from routing_lab.report import figure_sweep

    if args.csv is not None:
        write_output(args.csv, _csv(rows).encode())
    if args.figure is not None:
        write_output(args.figure, drawn(figure_sweep(rows), args.figure))
    if args.output is not None:
        write_output(args.output, choice.chosen.placement.to_yaml().encode())
    written = [str(path) for path in (args.csv, args.figure) if path is not None]
    written += [f"{args.output} (the chosen placement)"] if args.output is not None else []
    if written and not args.json:
        say(f"written: {', '.join(written)}")


def _csv(rows: Sequence[SweepRow]) -> str:
    from routing_lab.placement.sweep import CSV_COLUMNS

    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, CSV_COLUMNS)
    writer.writeheader()
    writer.writerows(row.to_dict() for row in rows)
    return text.getvalue()
