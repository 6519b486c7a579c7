"""How llama.cpp is told about expert counts: the only place that knows its override syntax. Text in, text out.

Three forms exist:

* The **preload** form sets a count per block: ``ROUTING_LAB_EXPERTS="0-6:6,7-32:5"`` in the environment, read by the
  override library that ``LD_PRELOAD`` names (see ``runtime/native``).
* The **argument** form says the same to the same library where several servers share one environment, as those of
  llama-server's router do: ``--override-kv routing_lab.experts_used=str:0-6:6/7-32:5``, a key that llama.cpp keeps and
  never looks at. Commas separate overrides there, and ``;`` begins a comment in a models preset; hence the slashes.
* The **stock** form needs no library and sets one count for all blocks:
  ``--override-kv qwen3moe.expert_used_count=int:6``. ``--override-kv`` has no array type, and an array *in the file* is
  loaded by llama.cpp and computed wrongly for nearly every architecture. A schedule with different counts therefore has
  no stock form.

Syntax of the options: llama.cpp's ``common/arg.cpp`` (``parse_csv_row``) and ``common/common.cpp``
(``string_parse_kv_override``).
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from routing_lab.errors import RuntimeUnsupportedError
from routing_lab.model import MAX_BLOCKS, FrozenMap, ModelFacts, format_blocks
from routing_lab.placement import EXPERTS_PATTERN, OUTPUT_PATTERN, HostTensors, Placement, TensorKind
from routing_lab.schedule import Schedule, format_counts

__all__ = [
    "CONTROL_ENV",
    "EXPERTS_ENV",
    "OVERRIDE_NAME",
    "PRELOAD_ENV",
    "WATCH_ENV",
    "KvOverride",
    "ServerCommand",
    "argument_overrides",
    "can_be_preloaded",
    "experts_setting",
    "merge_override_kv",
    "other_preloads",
    "override_kv",
    "parse_argument_overrides",
    "parse_experts",
    "parse_experts_setting",
    "parse_override_kv",
    "parse_placement",
    "parse_server_command",
    "preload_environment",
    "render_control",
    "render_experts",
    "render_override_kv",
    "server_command",
    "stock_override",
]

EXPERTS_ENV: Final = "ROUTING_LAB_EXPERTS"
"""Environment variable that the override library reads when llama.cpp starts."""
CONTROL_ENV: Final = "ROUTING_LAB_CONTROL"
"""Environment variable with the path of the file that switches the schedule of a running server."""
WATCH_ENV: Final = "ROUTING_LAB_WATCH"
"""Environment variable with an inherited descriptor: the server ends when its other end closes."""
PRELOAD_ENV: Final = "LD_PRELOAD"
OVERRIDE_NAME: Final = "expert_override"
"""In the name of every file of the override library."""
_DEFAULT_PORT: Final = 8080
OVERRIDE_KV: Final = "--override-kv"
_ARGUMENT_KEY: Final = "routing_lab.experts_used"
_OWN: Final = "own"

_ENTRY = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?:(\d{1,9})", re.ASCII)
_KV_TYPES: Final = ("int", "float", "bool", "str")
# llama.cpp keeps a key and a text value in 128 bytes each, the closing zero included.
_KV_MOST_BYTES: Final = 127

KvType = Literal["int", "float", "bool", "str"]


# ---------------------------------------------------------------------------------------------------------------------
# The preload form


def render_experts(schedule: Schedule, facts: ModelFacts) -> str:
    """Every routed block and its count, ``"0-6:6,7-32:5"``. Raises ``UserFileError`` where it does not fit."""
    return format_counts(schedule.resolve(facts))


def experts_setting(schedule: Schedule, facts: ModelFacts) -> str:
    """The preload form as a line for a shell or an env file: ``ROUTING_LAB_EXPERTS="0-6:6,7-32:5"``."""
    return f'{EXPERTS_ENV}="{render_experts(schedule, facts)}"'


def parse_experts_setting(text: str) -> dict[int, int]:
    """Inverse of ``experts_setting``, quotation marks optional. Raises ``ValueError`` for anything else."""
    name, equals, value = text.strip().partition("=")
    if name != EXPERTS_ENV or not equals:
        raise ValueError(f"{text.strip()[:60]!r} does not set {EXPERTS_ENV}")
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'"  # noqa: PLR2004 - a pair of marks
    return parse_experts(value[1:-1] if quoted else value)


def parse_experts(text: str) -> dict[int, int]:
    """Inverse of ``render_experts``: block -> count; an empty text is an empty dict.

    As strict as the override library: no blanks. Raises ``ValueError`` that says what is wrong where.
    """
    counts: dict[int, int] = {}
    for entry in text.split(",") if text else ():
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(f"{entry!r} is no entry such as 7-32:5 (blocks:experts)")
        first, last, count = int(match[1]), int(match[2] or match[1]), int(match[3])
        if last < first or last >= MAX_BLOCKS:
            raise ValueError(f"{entry!r}: the block range {first}-{last} is impossible")
        if count == 0:
            raise ValueError(f"{entry!r}: a block cannot consult 0 experts")
        again = counts.keys() & set(range(first, last + 1))
        if again:
            raise ValueError(f"{entry!r}: block {format_blocks(again)} is given twice")
        counts.update(dict.fromkeys(range(first, last + 1), count))
    return counts


def preload_environment(schedule: Schedule, facts: ModelFacts, library: Path) -> dict[str, str]:
    """The environment variables of the preload form.

    Raises ``ValueError`` where ``LD_PRELOAD`` cannot name the library, ``UserFileError`` where the schedule does not
    fit.
    """
    if not can_be_preloaded(library):
        raise ValueError(
            f"LD_PRELOAD cannot name {str(library)!r}: move the library to a path without blanks, colons and $"
        )
    return {PRELOAD_ENV: str(library), EXPERTS_ENV: render_experts(schedule, facts)}


def can_be_preloaded(library: Path) -> bool:
    """Whether ``LD_PRELOAD`` can name it.

    Blanks and colons separate names there, the dynamic loader replaces ``$LIB`` and its kin, and nothing can be quoted.
    """
    return not any(mark in str(library) for mark in " :\t\n$")


def other_preloads(text: str) -> str:
    """``LD_PRELOAD`` without override libraries: a second one, of another version perhaps, would answer first."""
    names = re.split(r"[ :]+", text)
    return " ".join(name for name in names if name and OVERRIDE_NAME not in name.rpartition("/")[2])


def render_control(generation: int, experts: str) -> str:
    """A control file: ``experts`` as ``render_experts`` gives it, an empty text for the model's own counts.

    The override library takes it when it appears whole (by a rename) with a generation above the last one.
    """
    return f"routing_lab control 1\ngeneration {generation}\nexperts {experts or 'own'}\nend\n"


# ---------------------------------------------------------------------------------------------------------------------
# The stock form


@dataclass(frozen=True, slots=True)
class KvOverride:
    """One metadata override: ``KEY=TYPE:VALUE``, its value as text."""

    key: str
    type: KvType
    value: str

    def __post_init__(self) -> None:
        if not self.key or "=" in self.key or "\0" in self.key + self.value:
            raise ValueError(f"{self.key!r} is no metadata key")
        if self.key.startswith('"'):
            raise ValueError(f"{self.key!r}: a key cannot start with a quotation mark")
        if self.type not in _KV_TYPES:
            raise ValueError(f"{self.type!r} is none of the types {', '.join(_KV_TYPES)}")
        if len(self.key.encode()) > _KV_MOST_BYTES:
            raise ValueError(f"the key {self.key!r} is longer than {_KV_MOST_BYTES} bytes")
        _check_kv_value(self.type, self.value)

    def __str__(self) -> str:
        return f"{self.key}={self.type}:{self.value}"


def stock_override(schedule: Schedule, facts: ModelFacts) -> KvOverride:
    """The override that makes an unmodified llama.cpp run a uniform schedule.

    Raises ``RuntimeUnsupportedError`` for a schedule with different counts, ``UserFileError`` for one that does not
    fit the model.
    """
    count = schedule.uniform_count(facts)
    if count is None:
        raise RuntimeUnsupportedError(
            f"schedule {schedule.name} ({render_experts(schedule, facts)}) has no stock form: --override-kv has no "
            f"array type and sets one count for all blocks; use the preload library, or a uniform schedule"
        )
    return KvOverride(f"{facts.architecture}.expert_used_count", "int", str(count))


def override_kv(schedule: Schedule, facts: ModelFacts) -> str:
    """``stock_override`` as the argument of ``--override-kv``: ``qwen3moe.expert_used_count=int:6``."""
    return render_override_kv([stock_override(schedule, facts)])


def parse_override_kv(text: str) -> list[KvOverride]:
    """The overrides of one ``--override-kv`` argument: separated by commas, quoted as in CSV where a value has one.

    Raises ``ValueError`` that names the entry which llama.cpp would refuse (or, for a number, misread).
    """
    return [_parse_kv_entry(entry) for entry in _split_csv(text)]


def render_override_kv(overrides: Iterable[KvOverride]) -> str:
    """One argument for all overrides: of several ``--override-kv`` llama-server's router would keep the last only."""
    return ",".join(_quote_csv(str(override)) for override in overrides)


def merge_override_kv(arguments: Sequence[str], ours: KvOverride | None) -> str:
    """The user's ``--override-kv`` arguments and ours as one argument; ours replaces theirs for the same key.

    Raises ``ValueError`` for an argument of theirs that is no override.
    """
    theirs = [override for argument in arguments for override in parse_override_kv(argument)]
    kept = [override for override in theirs if ours is None or override.key != ours.key]
    return render_override_kv([*kept, *([] if ours is None else [ours])])


def _parse_kv_entry(entry: str) -> KvOverride:
    key, equals, rest = entry.partition("=")
    kind, colon, value = rest.partition(":")
    for known in _KV_TYPES:
        if equals and colon and kind == known:
            return KvOverride(key, known, value)
    raise ValueError(f"{entry!r} is no override such as qwen3moe.expert_used_count=int:6")


def _check_kv_value(kind: str, value: str) -> None:
    if kind == "int" and not re.fullmatch(r"[+-]?\d{1,18}", value, re.ASCII):
        raise ValueError(f"{value!r} is no whole number")
    if kind == "float" and not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", value, re.ASCII):
        raise ValueError(f"{value!r} is no number")
    if kind == "bool" and value not in {"true", "false"}:
        raise ValueError(f"{value!r} is not true or false")
    if kind == "str" and len(value.encode()) > _KV_MOST_BYTES:
        raise ValueError(f"the text {value[:20]!r}... is longer than {_KV_MOST_BYTES} bytes")


def _split_csv(text: str) -> list[str]:
    """Fields of one CSV row exactly as llama.cpp splits them: a quote opens a field only at its start."""
    fields = [""]
    quoted = False
    position = 0
    while position < len(text):
        mark = text[position]
        if mark == '"' and not quoted and not fields[-1]:
            quoted = True
        elif mark == '"' and quoted and text[position + 1 : position + 2] == '"':
            fields[-1] += '"'
            position += 1
        elif mark == '"' and quoted:
            quoted = False
        elif mark == "," and not quoted:
            fields.append("")
        else:
            fields[-1] += mark
        position += 1
    return fields


def _quote_csv(entry: str) -> str:
    return '"' + entry.replace('"', '""') + '"' if "," in entry or '"' in entry else entry


# ---------------------------------------------------------------------------------------------------------------------
# The argument form


def argument_overrides(experts: str) -> list[KvOverride]:
    """``experts`` as ``render_experts`` gives it, an empty text for the model's own counts, as metadata overrides.

    Several where one text value cannot hold it; each key names its place and their number, as ``...used.1of2`` does.
    """
    parts = [""]
    for entry in experts.split(",") if experts else [_OWN]:
        longer = f"{parts[-1]}/{entry}".removeprefix("/")
        if len(longer) > _KV_MOST_BYTES:
            parts.append(entry)
        else:
            parts[-1] = longer
    if len(parts) == 1:
        return [KvOverride(_ARGUMENT_KEY, "str", parts[0])]
    return [KvOverride(f"{_ARGUMENT_KEY}.{at}of{len(parts)}", "str", part) for at, part in enumerate(parts, 1)]


def parse_argument_overrides(overrides: Iterable[KvOverride]) -> dict[int, int] | None:
    """Inverse of ``argument_overrides`` among other overrides: block -> count; ``None`` where no schedule is there.

    The model's own counts are an empty dict. As strict as the override library: raises ``ValueError`` for a part that
    is missing, given twice or malformed, and for a key of ours that is none.
    """
    parts: dict[int, str] = {}
    numbers: set[int] = set()
    for override in overrides:
        if not override.key.startswith(_ARGUMENT_KEY.partition(".")[0] + "."):
            continue
        match = re.fullmatch(re.escape(_ARGUMENT_KEY) + r"(?:\.(\d{1,9})of(\d{1,9}))?", override.key, re.ASCII)
        part, number = (int(match[1] or 1), int(match[2] or 1)) if match else (0, 0)
        if not 1 <= part <= number:
            raise ValueError(f"{override.key!r} is no key of the override library")
        if override.type != "str":
            raise ValueError(f"{override.key!r} must be of type str")
        if part in parts or (numbers and number not in numbers):
            raise ValueError(f"the schedule is given twice, at {override.key!r}")
        parts[part] = override.value
        numbers.add(number)
    if not parts:
        return None
    if {len(parts)} != numbers:
        raise ValueError(f"the schedule has {len(parts)} of its {max(numbers)} parts")
    if "" in parts.values():
        raise ValueError("a part of the schedule is empty")
    text = ",".join(parts[at] for at in sorted(parts)).replace("/", ",")
    return {} if text == _OWN else parse_experts(text)


# ---------------------------------------------------------------------------------------------------------------------
# The whole command line


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A llama-server call: what to add to the environment, and the argument list (program first)."""

    env: Mapping[str, str] = field(default_factory=lambda: FrozenMap[str, str]({}))
    argv: tuple[str, ...] = ("llama-server",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "env", FrozenMap(self.env))

    @classmethod
    def from_shell(cls, text: str) -> ServerCommand:
        """Inverse of ``shell``. Raises ``ValueError`` for a line that no shell reads."""
        env, argv = _split_command(shlex.split(text))
        return cls(env, tuple(argv))

    def value(self, option: str) -> str | None:
        """What follows ``option``, the last time where it is there several times."""
        values = [value for word, value in itertools.pairwise(self.argv) if word == option]
        return values[-1] if values else None

    @property
    def port(self) -> int:
        """The port of ``--port``, or llama-server's own default."""
        return int(self.value("--port") or _DEFAULT_PORT)

    def shell(self) -> str:
        """One line for a POSIX shell, everything quoted that needs it."""
        return shlex.join([*_assignments(self.env), *self.argv])


def server_command(
    model: Path,
    schedule: Schedule,
    facts: ModelFacts,
    *,
    library: Path | None,
    placement: Placement | None = None,
    context_tokens: int = 4096,
    threads: int | None = None,
    parallel: int = 1,
    host: str = "127.0.0.1",
    port: int = 8080,
    kv_overrides: Sequence[str] = (),
    extra: Sequence[str] = (),
    program: str = "llama-server",
) -> ServerCommand:
    """The command line that serves ``model`` under ``schedule``.

    With ``library`` the counts travel in the environment, without it in ``--override-kv``, merged with the user's own
    ``kv_overrides``. Every placement flag is explicit and ``--fit off`` is said as well, since llama-server
    otherwise chooses a placement of its own. ``context_tokens`` is for all ``parallel`` slots together. ``extra`` goes
    to the end unchanged.

    Raises ``RuntimeUnsupportedError`` without a library where the counts differ between blocks, ``UserFileError`` where
    schedule or placement do not fit the model, ``ValueError`` where an argument of the user's cannot be passed on.
    """
    placement = placement or Placement()
    placement.check(facts)
    env = {} if library is None else preload_environment(schedule, facts, library)
    ours = stock_override(schedule, facts) if library is None else None
    argv = [program, "--model", str(model), "--ctx-size", str(context_tokens), "--parallel", str(parallel)]
    argv += [*placement.to_flags(), "--fit", "off"]
    if threads is not None:
        argv += ["--threads", str(threads)]
    argv += ["--host", host, "--port", str(port)]
    merged = merge_override_kv([*kv_overrides, *_override_kv_of(extra)], ours)
    if merged:
        argv += [OVERRIDE_KV, merged]
    return ServerCommand(FrozenMap(env), (*argv, *_without_override_kv(extra)))


def parse_server_command(text: str, facts: ModelFacts, name: str = "parsed") -> Schedule:
    """The schedule that a shell line runs: what the library is told, else stock ``--override-kv``, else the baseline.

    Raises ``ValueError`` for a line that no shell reads, for variables or overrides that llama.cpp or the library would
    refuse, and where counts per block are there without ``LD_PRELOAD``, since they then do nothing.
    """
    command = ServerCommand.from_shell(text)
    overrides = [override for argument in _override_kv_of(command.argv) for override in parse_override_kv(argument)]
    if (counts := _told_to_library(command.env, overrides)) is not None:
        return Schedule.from_counts(name, counts or facts.experts_used)
    key = f"{facts.architecture}.expert_used_count"
    # llama-server warns that only the last of several arguments counts. It takes all, and the first of a key counts.
    for override in overrides:
        if override.key == key and override.type == "int":
            return Schedule.from_counts(name, dict.fromkeys(facts.routed_blocks, int(override.value)))
    return Schedule.from_counts(name, facts.experts_used)


def _told_to_library(env: Mapping[str, str], overrides: Sequence[KvOverride]) -> dict[int, int] | None:
    """What environment and command line say to the override library."""
    by_environment = parse_experts(env[EXPERTS_ENV]) if EXPERTS_ENV in env else None
    by_argument = parse_argument_overrides(overrides)
    for what, counts in ((EXPERTS_ENV, by_environment), (_ARGUMENT_KEY, by_argument)):
        if counts is not None and PRELOAD_ENV not in env:
            raise ValueError(f"{what} is set, but LD_PRELOAD names no library to read it")
    if by_environment is not None and by_argument is not None and by_environment != by_argument:
        raise ValueError(f"the command line and {EXPERTS_ENV} contradict each other: the server does not start")
    return by_environment if by_argument is None else by_argument


# ---------------------------------------------------------------------------------------------------------------------
# Placement flags


def parse_placement(argv: Sequence[str], facts: ModelFacts | None = None) -> Placement:
    """The placement that the flags in ``argv`` ask for; flags that are about something else are passed over.

    Reads what ``Placement.to_flags`` renders, the short names of the flags, and ``--cpu-moe``, which needs ``facts`` to
    know its blocks. A pattern that a placement cannot say (another buffer type, other tensors) is refused.

    Raises ``ValueError`` that names the flag.
    """
    gpu_layers, host_kv = 0, False
    host_experts: set[int] = set()
    patterns: list[str] = []
    words = iter(argv)
    for word in words:
        if word in {"--n-gpu-layers", "--gpu-layers", "-ngl"}:
            gpu_layers = _flag_count(word, next(words, ""), all_means=facts.blocks + 1 if facts else None)
        elif word in {"--n-cpu-moe", "-ncmoe"}:
            host_experts |= set(range(_flag_count(word, next(words, ""))))
        elif word in {"--cpu-moe", "-cmoe"}:
            if facts is None:
                raise ValueError(f"{word} means every block with experts, and without a model these are unknown")
            host_experts |= set(facts.blocks_with_experts)
        elif word in {"--override-tensor", "-ot"}:
            patterns += next(words, "").split(",")
        elif word in {"--no-kv-offload", "-nkvo"}:
            host_kv = True
    return _placed(patterns, gpu_layers, host_experts, host_kv=host_kv)


def _placed(patterns: Iterable[str], gpu_layers: int, host_experts: set[int], *, host_kv: bool) -> Placement:
    known = {kind.pattern: kind for kind in TensorKind}
    tensors: dict[TensorKind, set[int]] = {}
    host_output = False
    for entry in patterns:
        pattern, _, where = entry.rpartition("=")
        match = re.fullmatch(r"blk\\\.\((\d{1,4}(?:\|\d{1,4})*)\)(.+)", pattern, re.ASCII)
        blocks = {int(block) for block in match[1].split("|")} if match else set()
        if where == "CPU" and pattern == OUTPUT_PATTERN:
            host_output = True
        elif where == "CPU" and match and match[2] == EXPERTS_PATTERN:
            host_experts |= blocks
        elif where == "CPU" and match and match[2] in known:
            tensors.setdefault(known[match[2]], set()).update(blocks)
        else:
            raise ValueError(f"--override-tensor {entry!r}: no placement says this")
    return Placement(
        gpu_layers=gpu_layers,
        host_experts=tuple(host_experts),
        host_tensors=tuple(HostTensors(kind, tuple(blocks)) for kind, blocks in tensors.items()),
        host_output=host_output,
        host_kv=host_kv,
    )


def _flag_count(flag: str, value: str, all_means: int | None = None) -> int:
    if value == "all" and all_means is not None:
        return all_means
    if re.fullmatch(r"\d{1,7}", value, re.ASCII) is None:
        raise ValueError(f"{flag} {value!r} is no number of layers")
    return int(value)


def _assignments(env: Mapping[str, str]) -> list[str]:
    # Through env(1): a quoted word such as 'A=b c' would be a command to the shell, not an assignment.
    return ["env", *(f"{key}={value}" for key, value in env.items())] if env else []


def _split_command(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Leading assignments (after ``env`` or bare, as a person writes them) and the rest."""
    env: dict[str, str] = {}
    rest = list(words[1:] if words[:1] == ["env"] else words)
    while rest and re.match(r"[A-Za-z_]\w*=", rest[0], re.ASCII):
        key, _, value = rest.pop(0).partition("=")
        env[key] = value
    return env, rest


def _override_kv_of(argv: Sequence[str]) -> list[str]:
    return [value for option, value in itertools.pairwise(argv) if option == OVERRIDE_KV]


def _without_override_kv(argv: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for position, word in enumerate(argv):
        is_option = word == OVERRIDE_KV
        is_value = position > 0 and argv[position - 1] == OVERRIDE_KV
        if not is_option and not is_value:
            kept.append(word)
    return kept
