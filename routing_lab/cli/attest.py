"""``routing-lab attest``: what schedule a running llama-server has, or each of those under llama-server's router."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from routing_lab.cli import options
from routing_lab.cli.output import console, fact_table, print_json
from routing_lab.errors import RuntimeUnsupportedError, UsageError

if TYPE_CHECKING:
    from routing_lab.runtime.report import ServedSchedule
    from routing_lab.runtime.router import ServedModel, ServedRouter
    from routing_lab.schedule import Schedule


def add(commands: options.Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = options.command(
        commands,
        "attest",
        run,
        help="say what schedule a running llama-server has, read back from its graphs",
        description="Read back what the graphs of a running llama-server were built with. The server must run on this\n"
        "machine, as this user, and under the override library (LD_PRELOAD, as export prints it).\n"
        "Of llama-server's router, every model that it has loaded is read back.",
        example="routing-lab attest --url http://127.0.0.1:8080 --schedule night-schedule.yaml",
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8080", metavar="URL", help="where it listens (default: %(default)s)"
    )
    parser.add_argument(
        "--schedule", type=Path, metavar="YAML", help="exit with 4 where the server has another one than this"
    )
    parser.add_argument(
        "--entry",
        metavar="NAME",
        help="of a router, look at this model only (with --schedule by default the entry that export names after it)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the counts; exit code 4 where they cannot be read, or are not the wanted ones."""
    from routing_lab.runtime.router import ServedRouter, served_at

    wanted = options.load_schedules([args.schedule])[0] if args.schedule is not None else None
    found = served_at(args.url)
    if isinstance(found, ServedRouter):
        return _run_router(args, found, wanted)
    if args.entry is not None:
        raise UsageError(f"--entry names a model of a router, and process {found.process} is a server of one model")
    if wanted is not None:
        _compare(wanted, found)
    if args.json:
        print_json(_fields(found))
    else:
        console().print(fact_table(_rows(found)))
    return 0


def _run_router(args: argparse.Namespace, router: ServedRouter, wanted: Schedule | None) -> int:
    from routing_lab.export.forms import preset_entry

    entry = args.entry or (None if wanted is None else preset_entry(wanted))
    if entry is None:
        router.require_models()
        models = router.models
    else:
        models = (router.model(entry),)
        served = models[0].require()
        if wanted is not None:
            _compare(wanted, served)
    if args.json:
        print_json(
            {
                "process": router.process,
                "program": router.program,
                "models": list(map(_model_fields, models)),
                "not_loaded": list(router.not_loaded),
            }
        )
    else:
        _print_router(router, models)
    return 0


def _print_router(router: ServedRouter, models: tuple[ServedModel, ...]) -> None:
    out = console()
    out.print(fact_table({"router": f"process {router.process} ({router.program})"}))
    for model in models:
        out.print()
        rows = {"problem": model.problem or ""} if model.served is None else _rows(model.served)
        out.print(fact_table({"model": model.name} | rows))
    if router.not_loaded:
        out.print()
        out.print(fact_table({"not loaded": ", ".join(router.not_loaded)}))


def _model_fields(model: ServedModel) -> dict[str, object]:
    fields = {"process": model.process} if model.served is None else _fields(model.served)
    return {"model": model.name, **fields, "problem": model.problem}


def _compare(wanted: Schedule, served: ServedSchedule) -> None:
    """Blocks that the schedule does not list keep the model's own count.

    Raises:
        RuntimeUnsupportedError: Blocks of the graph that decodes have other counts; all of them are named.
    """
    expected = wanted.over(dict(served.own))
    differing = {block: count for block, count in expected.items() if served.experts_used.get(block) != count}
    if differing:
        raise RuntimeUnsupportedError(f"process {served.process} {_difference(wanted.name, differing, served)}")


def _difference(name: str, differing: dict[int, int], served: ServedSchedule) -> str:
    from routing_lab.model import format_blocks
    from routing_lab.schedule import format_counts

    decoding = {block: served.experts_used[block] for block in differing if block in served.experts_used}
    missing = format_blocks(set(differing) - set(decoding))
    found = [f"decodes with {format_counts(decoding)}"] if decoding else []
    found += [f"has no routed experts in {_blocks(missing)}"] if missing else []
    blocks = _blocks(format_blocks(differing))
    return f"differs from {name} in {blocks}: wanted {format_counts(differing)}, {' and '.join(found)}"


def _blocks(blocks: str) -> str:
    return f"block {blocks}" if blocks.isdigit() else f"blocks {blocks.replace(',', ', ')}"


def _fields(served: ServedSchedule) -> dict[str, object]:
    from routing_lab.schedule import format_counts

    return {
        "process": served.process,
        "program": served.program,
        "experts_used": format_counts(served.experts_used),
        "prompt_experts_used": format_counts(served.prompt_experts_used),
        "own": format_counts(served.own),
        "source": served.source,
        "generation": served.generation,
        "next_graph": served.next_graph,
        "refused": served.refused,
    }


def _rows(served: ServedSchedule) -> dict[str, str]:
    fields = _fields(served)
    rows = {
        "server": f"process {fields['process']} ({fields['program']})",
        "decodes with": f"{fields['experts_used']}, read back",
        "model's own": f"{fields['own']}",
        "set by": f"{fields['source']}",
    }
    if fields["prompt_experts_used"] != fields["experts_used"]:
        rows["reads prompts with"] = f"{fields['prompt_experts_used']}"
    if fields["next_graph"] is not None:
        rows["next graph"] = f"{fields['next_graph']}"
    if fields["refused"] is not None:
        rows["last order refused"] = f"{fields['refused']}"
    return rows
