"""Options that several commands share, and the objects they stand for."""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from routing_lab import demo
from routing_lab.errors import Problem, UsageError, UserFileError
from routing_lab.interrupts import unwinding

if TYPE_CHECKING:
    from routing_lab.certificate import Certificate
    from routing_lab.measure import MeasureSettings
    from routing_lab.model import ModelFacts
    from routing_lab.placement import Placement
    from routing_lab.probes import ProbeSet
    from routing_lab.probes.probeset import Split
    from routing_lab.runtime.base import RuntimeOptions
    from routing_lab.runtime.llama import LlamaRuntime
    from routing_lab.runtime.server import ServerRuntime
    from routing_lab.schedule import Schedule

MOST = 2**31 - 1
"""What a C int holds: no count of this tool is larger, and libllama takes none."""

MOST_THREADS = 512
"""``GGML_MAX_N_THREADS`` in ggml.h; more end the model's process."""

CONTEXT = 4096
"""Tokens, where neither the user nor a placement file names a number."""

MOST_CONTEXT = 2**24
"""Tokens; the longest contexts that models are made for have 10 million."""

MOST_ROUNDS = 300
"""The interval of a ratio takes the cube of this: a second here, a minute at 1200."""

MOST_GPU_LAYERS = 2**20
"""As in a placement file."""

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
        description=folded(description or help[0].upper() + help[1:] + "."),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.set_defaults(run=run)
    return parser


def folded(text: str) -> str:
    """``text`` at the width of the terminal; a blank line parts paragraphs."""
    width = min(max(shutil.get_terminal_size().columns - 2, 30), 98)
    return "\n\n".join(textwrap.fill(" ".join(part.split()), width) for part in text.split("\n\n"))


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


def add_runtime(parser: argparse.ArgumentParser, *, placement: bool = True, server: bool = True) -> None:
    """How the model is loaded: threads, context, library, and the placement where the command does not choose it.

    Without ``server`` the command knows libllama in process only.
    """
    group = parser.add_argument_group("how the model is loaded")
    threads = whole(1, MOST_THREADS, "llama.cpp takes no more")
    context = whole(1, MOST_CONTEXT)
    group.add_argument("--threads", type=threads, metavar="N", help="default: every core, but 1 for a tiny model")
    parser.set_defaults(context_given=False)
    group.add_argument(
        "--context",
        action=_Given,
        type=context,
        default=CONTEXT,
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
    if server:
        add_server(group)
    else:
        parser.set_defaults(runtime="llama", llama_server=None)


def add_server(group: argparse._ArgumentGroup) -> None:
    """Which of the two runtimes, and which llama-server."""
    group.add_argument(
        "--runtime",
        choices=("llama", "server"),
        default="llama",
        help="libllama in process, or a llama-server (default: %(default)s)",
    )
    group.add_argument(
        "--llama-server", type=Path, metavar="PATH", help="the server (default: on PATH, else of make llama-server)"
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
    layers = whole(0, MOST_GPU_LAYERS, "99 is enough to mean all of them")
    group.add_argument("--gpu-layers", type=layers, metavar="N", help="layers kept on the GPU (default: 0)")
    group.add_argument(
        "--host-experts", metavar="BLOCKS", help="blocks whose routed experts stay in host memory, as 33-40"
    )
    group.add_argument("--placement", type=Path, metavar="YAML", help="placement file, instead of the two above")


RUNTIME = (
    "runtime",
    "llama_server",
    "threads",
    "context",
    "gpu_layers",
    "host_experts",
    "placement",
    "rpc",
    "library",
    "stock",
)
"""The options of ``add_runtime``."""


_DEFAULTS: Mapping[str, object] = {"context": CONTEXT, "runtime": "llama"}


def command_line(args: argparse.Namespace, command: str, *names: str) -> str:
    """A command for a shell that repeats those of the named options that were given."""
    words = ["routing-lab", command]
    for name in names:
        value = getattr(args, name)
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif isinstance(value, list):
            words += [word for one in value for word in (option, str(one))]
        elif value not in {None, False, _DEFAULTS.get(name)}:
            words += [option, str(value)]
    return shlex.join(words)


@contextlib.contextmanager
def open_runtime(args: argparse.Namespace) -> Iterator[LlamaRuntime | ServerRuntime]:
    """The loaded model, closed at the end whatever happens."""
    from routing_lab.runtime.llama import LlamaRuntime
    from routing_lab.runtime.server import ServerRuntime

    # The signals are looked after outside, so that a second one cannot meet the model's process while it is ended.
    facts = read_facts(args)
    require_context(args, facts)
    check_server(args)
    model, options = model_path(args), runtime_options(args)
    if args.placement is not None:
        require_fit(options.placement, args.placement, facts)
    with unwinding():
        serves = args.runtime == "server"
        opened = ServerRuntime(model, options, binary=args.llama_server) if serves else LlamaRuntime(model, options)
        with opened as runtime:
            yield runtime


def check_server(args: argparse.Namespace) -> None:
    """Refuse options of the runtime that was not chosen.

    Raises:
        UsageError: ``--llama-server`` for libllama in process, or ``--library`` or ``--stock`` for a server.
    """
    if args.runtime == "llama" and args.llama_server is not None:
        raise UsageError("--llama-server names what only --runtime server starts; give both or neither")
    if args.runtime == "server" and args.library is not None:
        raise UsageError("--library is for --runtime llama: a llama-server loads its own libllama; name --llama-server")
    if args.runtime == "server" and args.stock:
        raise UsageError("--stock is for --runtime llama: a llama-server cannot be attested without the override")


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
        context_tokens=_context(args)[0],
        placement=placement,
        override="off" if args.stock else "auto",
        library_dir=args.library,
        rpc_servers=tuple(args.rpc),
    )


def _context(args: argparse.Namespace) -> tuple[int, str]:
    """The context in force, and who says so: the option, else the placement's file, else the default."""
    placed = None if args.context_given or args.placement is None else _placement(args).context_tokens
    return (
        (args.context, f"--context {args.context}")
        if placed is None
        else (placed, f"{args.placement}: context {placed}")
    )


def require_fit(placement: Placement, path: Path, facts: ModelFacts) -> None:
    """Check a placement, under the name of its file, which is what the user gave. Raises ``UserFileError``."""
    try:
        placement.check(facts)
    except UserFileError as error:
        raise UserFileError(str(path), error.problems) from None


def _placement(args: argparse.Namespace) -> Placement:
    from routing_lab.placement import Placement
    from routing_lab.schedule import parse_blocks

    if args.placement is not None:
        if args.gpu_layers is not None or args.host_experts is not None:
            raise UsageError("--placement already says what --gpu-layers and --host-experts say; give one or the other")
        return Placement.load(args.placement)
    try:
        return Placement(gpu_layers=args.gpu_layers or 0, host_experts=parse_blocks(args.host_experts or ""))
    except ValueError as error:
        raise UsageError(f"--gpu-layers, --host-experts: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Probes, measurement, schedules


def add_probes(parser: argparse._ActionsContainer) -> None:
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


MORE_ROUNDS = 8
"""Rounds may be added up to so many times the number asked for, and ``MOST_ROUNDS`` in all."""


def add_plain(parser: argparse.ArgumentParser) -> None:
    """``--plain``: no drafts."""
    parser.add_argument(
        "--plain",
        action="store_true",
        help="decode every answer instead of checking the baseline's as drafts (slower, same verdicts)",
    )


def add_measure(parser: argparse.ArgumentParser, *, rounds: int, precision: float | None = None) -> None:
    """How speed is measured; ``rounds`` and ``precision`` are the defaults of this command."""
    group = parser.add_argument_group("how speed is measured")
    group.add_argument(
        "--tokens", type=positive, default=32, metavar="N", help="decoded per round (default: %(default)s)"
    )
    group.add_argument(
        "--depth",
        type=positive,
        default=16,
        metavar="N",
        help="tokens in the context before them; the deeper, the smaller the experts' share (default: %(default)s)",
    )
    group.add_argument(
        "--rounds",
        type=whole(1, MOST_ROUNDS),
        default=rounds,
        metavar="N",
        help="interleaved rounds (default: %(default)s)",
    )
    parser.set_defaults(precision=None)
    if precision is not None:
        group.add_argument(
            "--precision",
            type=decimal(0.0001, 1),
            default=precision,
            metavar="SHARE",
            help=f"add rounds, up to {MORE_ROUNDS} times as many, until the interval of a ratio reaches no further "
            "than this share of it to either side (default: %(default)s)",
        )


def measure_settings(args: argparse.Namespace) -> MeasureSettings:
    """The options of ``add_measure`` as a value.

    Raises:
        UsageError: Too few rounds for an interval, or more tokens than the context holds.
    """
    from routing_lab.measure import MeasureSettings

    try:
        more = None if args.precision is None else min(MORE_ROUNDS * args.rounds, MOST_ROUNDS)
        settings = MeasureSettings(
            tokens=args.tokens,
            prompt_tokens=args.depth,
            rounds=args.rounds,
            most_rounds=more,
            half_width=args.precision,
        )
    except ValueError as error:
        raise UsageError(f"--tokens, --rounds: {error}") from error
    context, said = _context(args)
    if settings.tokens + settings.prompt_tokens >= context:
        raise UsageError(
            f"--tokens {settings.tokens} behind --depth {settings.prompt_tokens} do not fit in {said}: "
            "give fewer tokens or more context"
        )
    return settings


Check = Callable[[], object]


def load_schedules(paths: list[Path], facts: ModelFacts | None = None) -> list[Schedule]:
    """Every schedule file, or every problem of every file at once; of a certificate, the schedule that it is about.

    With ``facts`` a file that is bad also says what in it does not fit the model.
    """
    schedules: list[Schedule] = []
    collect_problems([partial(_append_loaded, schedules, path, facts) for path in paths])
    return schedules


def _append_loaded(schedules: list[Schedule], path: Path, facts: ModelFacts | None) -> None:
    from routing_lab.schedule import Schedule, is_certificate
    from routing_lab.yamlfile import read_text

    text = read_text(path)  # once: standard input is there only once
    if is_certificate(text):
        from routing_lab.certificate import Certificate

        schedules.append(certified_schedule(Certificate.from_yaml(text, str(path))))
    else:
        schedules.append(Schedule.from_yaml(text, str(path), facts))


def certified_schedule(certificate: Certificate) -> Schedule:
    """The schedule of a certificate as its own file would have it: with its model, and where it comes from."""
    from routing_lab.overrides import parse_experts
    from routing_lab.schedule import ScheduledModel, ScheduleSource

    model = certificate.model
    own = set(parse_experts(model.experts_used).values())
    return replace(
        certificate.schedule.schedule,
        model=ScheduledModel(model.architecture, model.blocks, model.experts, own.pop() if len(own) == 1 else None),
        source=ScheduleSource(
            f"certificate of {certificate.created}", round(certificate.speed.candidate_tokens_per_s, 1), "correct"
        ),
    )


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


def require_splits(probes: ProbeSet, *splits: Split) -> None:
    """Find out before the model is loaded that there is nothing to ask it. Raises ``UsageError``."""
    for split in splits:
        if not probes.split(split):
            raise UsageError(f"probe set {probes.name} has no {split} probes, so nothing could be decided")


def require_context(args: argparse.Namespace, facts: ModelFacts) -> None:
    """Refuse more context than the model was made for (the default is taken as it is). Raises ``UsageError``."""
    context, said = _context(args)
    if facts.context_length and context > max(facts.context_length, CONTEXT):
        raise UsageError(f"{said}: {facts.name} was made for at most {facts.context_length} tokens")


# ---------------------------------------------------------------------------------------------------------------------
# Values


def whole(least: int, most: int, why: str = "") -> Callable[[str], int]:
    """A type for argparse: a whole number from ``least`` to ``most``; ``why`` says where ``most`` comes from."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"needs a whole number, not {_short(text)}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"needs a whole number of at least {least}, not {_short(text)}")
        if value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}{f' ({why})' if why else ''}, not {_short(text)}")
        return value

    return parse


def decimal(least: float, most: float, unit: str = "") -> Callable[[str], float]:
    """A type for argparse: a finite number from ``least`` to ``most``, both included."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"needs a number from {least:g} to {most:g}{unit}, not {_short(text)}")
        return value

    return parse


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
        raise argparse.ArgumentTypeError(f"needs a number above 0, not {_short(text)}")
    return value


positive = whole(1, MOST)
"""A whole number of at least 1."""

non_negative = whole(0, MOST)
"""A whole number of at least 0."""


def non_negative_number(text: str) -> float:
    """A finite number of at least 0."""
    return 0.0 if text.strip() in {"0", "0.0"} else positive_number(text)


port = whole(1, _LAST_PORT)
"""The number of a TCP port."""


def share(text: str) -> float:
    """A share from 0 up to, but not including, 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"needs a number from 0 to below 1, not {_short(text)}")
    return value


def _short(text: str, most: int = 40) -> str:
    return repr(text) if len(text) <= most else f"{text[:most]!r}..."
