"""Options that several commands share, and the objects they stand for."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from routing_lab import demo
from routing_lab.errors import Problem, UsageError, UserFileError

if TYPE_CHECKING:
    from routing_lab.measure import MeasureSettings
    from routing_lab.model import ModelFacts
    from routing_lab.placement import Placement
    from routing_lab.probes import ProbeSet
    from routing_lab.runtime.base import RuntimeOptions
    from routing_lab.runtime.llama import LlamaRuntime
    from routing_lab.schedule import Schedule

CONTEXT_TOKENS = 4096
_LAST_PORT = 65535

Subparsers = argparse._SubParsersAction  # noqa: SLF001 - argparse has no public name for it


def command(
    commands: Subparsers[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,  # noqa: A002 - argparse's own word
    description: str = "",
    example: str,
) -> argparse.ArgumentParser:
    """Add one command with ``--json``, its help and an example."""
    parser = commands.add_parser(
        name,
        help=help,
        description=description or help[0].upper() + help[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.set_defaults(run=run)
    return parser


def group(commands: Subparsers[argparse.ArgumentParser], name: str, *, help: str) -> argparse.ArgumentParser:  # noqa: A002
    """Add a command that has actions of its own."""
    parser = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".", allow_abbrev=False)
    # An error before the action is known has nowhere else to look.
    parser.set_defaults(json=False)
    return parser


# ---------------------------------------------------------------------------------------------------------------------
# The model and how it is loaded


def add_model(parser: argparse.ArgumentParser) -> None:
    """``--model``: a GGUF file, the demo model when absent."""
    parser.add_argument("--model", type=Path, metavar="GGUF", help="model file; of a split one, its first shard")


def model_path(args: argparse.Namespace) -> Path:
    """The model the user named, or the demo model."""
    return demo.model_path() if args.model is None else args.model


def read_facts(args: argparse.Namespace) -> ModelFacts:
    """Facts of the chosen model."""
    from routing_lab.model import ModelFacts

    return ModelFacts.read(model_path(args))


def add_runtime(parser: argparse.ArgumentParser, *, placement: bool = True) -> None:
    """How the model is loaded: threads, context, library, and the placement where the command does not choose it."""
    group = parser.add_argument_group("how the model is loaded")
    group.add_argument("--threads", type=positive, metavar="N", help="default: every core, but 1 for a tiny model")
    parser.set_defaults(context_given=False)
    group.add_argument(
        "--context",
        action=_Given,
        type=positive,
        default=CONTEXT_TOKENS,
        metavar="N",
        help="tokens (default: the placement's, else %(default)s)",
    )
    if placement:
        add_placement(group)
    else:
        parser.set_defaults(gpu_layers=None, host_experts=None, placement=None)
    group.add_argument(
        "--rpc",
        action="append",
        type=endpoint,
        default=[],
        metavar="HOST:PORT",
        help="use the devices of an RPC server",
    )
    group.add_argument("--library", type=Path, metavar="DIR", help="folder with libllama (default: the installed one)")
    group.add_argument(
        "--stock", action="store_true", help="do not preload the override; only uniform schedules can run then"
    )


class _Given(argparse.Action):
    """Stores a value, and under ``<name>_given`` that it was the user's: a placement file may have another default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - argparse's signature
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,  # noqa: ARG002 - argparse's signature
    ) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, f"{self.dest}_given", True)


def add_placement(group: argparse._ArgumentGroup) -> None:
    """Where weights live."""
    group.add_argument("--gpu-layers", type=non_negative, metavar="N", help="layers kept on the GPU (default: 0)")
    group.add_argument(
        "--host-experts", metavar="BLOCKS", help="blocks whose routed experts stay in host memory, as 33-40"
    )
    group.add_argument("--placement", type=Path, metavar="YAML", help="placement file, instead of the two above")


@contextlib.contextmanager
def open_runtime(args: argparse.Namespace) -> Iterator[LlamaRuntime]:
    """The loaded model, closed at the end whatever happens."""
    from routing_lab.runtime.llama import LlamaRuntime

    with LlamaRuntime(model_path(args), runtime_options(args)) as runtime:
        yield runtime


def runtime_options(args: argparse.Namespace) -> RuntimeOptions:
    """The options of ``add_runtime`` as a value.

    Raises:
        UsageError: ``--placement`` beside an option that it replaces.
        UserFileError: The placement file is bad.
    """
    from routing_lab.runtime.base import RuntimeOptions

    placement = _placement(args)
    return RuntimeOptions(
        threads=args.threads,
        context_tokens=args.context if args.context_given else placement.context_tokens or args.context,
        placement=placement,
        override="off" if args.stock else "auto",
        library_dir=args.library,
        rpc_servers=tuple(args.rpc),
    )


def _placement(args: argparse.Namespace) -> Placement:
    from routing_lab.placement import Placement
    from routing_lab.schedule import parse_blocks

    if args.placement is not None:
        if args.gpu_layers is not None or args.host_experts is not None:
            raise UsageError("--placement already says what --gpu-layers and --host-experts say; give one or the other")
        return Placement.load(args.placement)
    try:
        host_experts = parse_blocks(args.host_experts or "")
    except ValueError as error:
        raise UsageError(f"--host-experts: {error}") from error
    return Placement(gpu_layers=args.gpu_layers or 0, host_experts=host_experts)


# ---------------------------------------------------------------------------------------------------------------------
# Probes, measurement, schedules


def add_probes(parser: argparse.ArgumentParser) -> None:
    """``--probes``: a probe set, the demo model's own when absent."""
    parser.add_argument("--probes", type=Path, metavar="YAML", help="probe set (default: that of the demo model)")


def probe_set(args: argparse.Namespace) -> ProbeSet:
    """The probe set the user named, or the demo model's.

    Raises:
        UsageError: Another model than the demo model, and no probes for it.
    """
    from routing_lab.probes import ProbeSet

    if args.probes is not None:
        return ProbeSet.load(args.probes)
    if args.model is not None:
        raise UsageError("--model needs --probes: the built-in probe set asks what only the demo model was trained on")
    return ProbeSet.load(demo.probes_path())


def add_measure(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    """How speed is measured; ``rounds`` is the default of this command."""
    group = parser.add_argument_group("how speed is measured")
    group.add_argument(
        "--tokens", type=positive, default=128, metavar="N", help="decoded per round (default: %(default)s)"
    )
    group.add_argument(
        "--rounds", type=positive, default=rounds, metavar="N", help="interleaved rounds (default: %(default)s)"
    )


def measure_settings(args: argparse.Namespace) -> MeasureSettings:
    """The options of ``add_measure`` as a value.

    Raises:
        UsageError: Too few rounds for an interval.
    """
    from routing_lab.measure import MeasureSettings

    try:
        return MeasureSettings(tokens=args.tokens, rounds=args.rounds)
    except ValueError as error:
        raise UsageError(f"--tokens, --rounds: {error}") from error


Check = Callable[[], object]


def load_schedules(paths: list[Path]) -> list[Schedule]:
    """Every schedule file, or every problem of every file at once."""
    schedules: list[Schedule] = []
    collect_problems([partial(_append_loaded, schedules, path) for path in paths])
    return schedules


def _append_loaded(schedules: list[Schedule], path: Path) -> None:
    from routing_lab.schedule import Schedule

    schedules.append(Schedule.load(path))


def check_fit(schedules: list[Schedule], paths: list[Path], facts: ModelFacts) -> None:
    """Check that every schedule fits the model; messages name its file, which is what the user gave."""
    collect_problems([partial(_fit, schedule, path, facts) for schedule, path in zip(schedules, paths, strict=True)])


def _fit(schedule: Schedule, path: Path, facts: ModelFacts) -> None:
    try:
        schedule.resolve(facts)
    except UserFileError as error:
        raise UserFileError(str(path), error.problems) from None


def collect_problems(checks: Iterable[Check]) -> None:
    """Run every check, and raise what they found about files as one error.

    Raises:
        UserFileError: One file's own error, or one that lists the problems of all files.
    """
    broken: list[UserFileError] = []
    for check in checks:
        try:
            check()
        except UserFileError as error:
            broken.append(error)
    if len(broken) == 1:
        raise broken[0]
    if broken:
        problems = [
            Problem(f"{error.file}: {problem.where}" if problem.where else error.file, problem.what, problem.remedy)
            for error in broken
            for problem in error.problems
        ]
        raise UserFileError(f"{len(broken)} files", problems)


def check_output(path: Path) -> None:
    """Find out before the work, not after it, that its result cannot be written.

    Raises:
        UsageError: ``path`` is a folder, or its folder is not there and cannot be made, or may not be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{path} cannot be written: {'it is a folder' if path.is_dir() else 'permission denied'}")


# ---------------------------------------------------------------------------------------------------------------------
# Values


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _at_least(1, text)


def non_negative(text: str) -> int:
    """A whole number of at least 0."""
    return _at_least(0, text)


def endpoint(text: str) -> str:
    """``HOST:PORT``."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= _LAST_PORT:
        raise argparse.ArgumentTypeError(f"needs HOST:PORT, not {text!r}")
    return text


def positive_number(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"needs a number above 0, not {text!r}")
    return value


def non_negative_number(text: str) -> float:
    """A finite number of at least 0."""
    return 0.0 if text.strip() in {"0", "0.0"} else positive_number(text)


def share(text: str) -> float:
    """A share from 0 up to, but not including, 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"needs a number from 0 to below 1, not {text!r}")
    return value


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"needs a whole number of at least {least}, not {text!r}")
    return value
