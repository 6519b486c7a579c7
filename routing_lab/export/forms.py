"""An export in the forms that run it: a models preset, a systemd user unit, a compose service, a Python snippet.

Each has a parser that reads the schedule back from the text alone, so that a form which lost or changed a count would
be found by its own test. Every text begins with the export's comment: what it is, who validated it, what differs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from routing_lab.errors import UsageError
from routing_lab.export.document import Export
from routing_lab.model import ModelFacts
from routing_lab.overrides import (
    OVERRIDE_KV,
    PRELOAD_ENV,
    ServerCommand,
    argument_overrides,
    parse_experts,
    parse_placement,
    parse_server_command,
    render_override_kv,
)
from routing_lab.schedule import Schedule
from routing_lab.yamlfile import parse_yaml, render_yaml

__all__ = [
    "FORMATS",
    "IMAGE",
    "PARSERS",
    "PRESET",
    "parse_compose",
    "parse_ini",
    "parse_python",
    "parse_systemd",
    "preset_entry",
]

IMAGE: Final = "ghcr.io/ggml-org/llama.cpp:server"
"""The official image with llama-server for CPUs; its tags ``server-cuda`` and others take the same service."""

PRESET: Final = "models.ini"
"""The name that a models preset is to be saved under, so that its comment can say the router's whole command."""

BASELINE: Final = "baseline"
_MODEL_FOLDER: Final = PurePosixPath("/models")
_LIBRARY: Final = PurePosixPath("/routing-lab/expert_override.so")
# The router chooses these for the servers that it starts.
_OF_ROUTER: Final = frozenset({"--host", "--port"})
_FLAGS: Final = frozenset({"--no-kv-offload"})
_ROUTER_COMMENT: Final = f"# save this file as {PRESET}; the router's command, in the same folder:"


def _comment(export: Export) -> list[str]:
    """The comment that the shell form begins with. A backslash at a line's end would join it with the next."""
    head = export.text().split("\n\n", 1)[0]
    return [line.rstrip("\\") for line in head.splitlines()]


def _plain(text: str, what: str, forbidden: str = "") -> str:
    """``text``, refused where a form has no way to say a character of it."""
    wrong = next((mark for mark in text if mark in forbidden or not mark.isprintable()), None)
    if wrong is not None:
        raise UsageError(f"{what} cannot hold {wrong!r} in {text!r}: rename the file")
    return text


def _argv(export: Export) -> list[str]:
    """The command with an absolute path of the model: a service starts in another folder."""
    argv = list(export.command.argv)
    position = argv.index("--model") + 1
    argv[position] = str(Path(argv[position]).absolute())
    return argv


def _option_pairs(argv: Sequence[str]) -> list[tuple[str, str | None]]:
    """Options and their values; a flag has ``None``."""
    words = iter(argv[1:])
    return [(word, None if word in _FLAGS else next(words)) for word in words]


# ---------------------------------------------------------------------------------------------------------------------
# A models preset for llama-server's router (``--models-preset``)


def render_ini(export: Export) -> str:
    """Two entries of a models preset, baseline and schedule. Grammar: llama.cpp's ``common/preset.cpp``.

    The router starts all its servers with one environment, so counts per block travel as an argument of each server to
    the override library, which the router must be started with; the comment says the whole command.
    """
    merged: dict[str, list[str]] = {}
    for option, value in _option_pairs(_argv(export)):
        if option not in {*_OF_ROUTER, OVERRIDE_KV}:
            merged.setdefault(option.lstrip("-"), []).append("true" if value is None else value)
    for values in merged.values():
        for value in values:
            if value != value.strip():
                raise UsageError(f"a models preset cannot hold {value!r} with blanks at its ends: rename the file")
    # A key counts once; --override-tensor takes several patterns with commas between them.
    lines = [f"{key} = {_plain(','.join(values), 'a models preset', ';#')}" for key, values in merged.items()]
    own, counted = _counts_of_entries(export)
    sections = [f"[{BASELINE}]", *lines, *own, "", f"[{preset_entry(export.schedule)}]", *lines, *counted]
    command = _plain(_router(export).shell(), "a models preset")
    return "\n".join([*_comment(export), _ROUTER_COMMENT, f"# {command}", "version = 1", "", *sections]) + "\n"


def preset_entry(schedule: Schedule) -> str:
    """The name of a schedule's entry, which is also the ``model`` of a request to the router."""
    return f"schedule-{re.sub(r'[^A-Za-z0-9_.-]', '-', schedule.name)}"


def _counts_of_entries(export: Export) -> tuple[list[str], list[str]]:
    """The lines that set the counts of the baseline's entry and of the schedule's.

    With the library the baseline says its own counts too: a schedule in the router's environment, which every server
    inherits, then contradicts it, and the library does not let it start.
    """
    key = OVERRIDE_KV.lstrip("-")
    if export.override_kv is not None:
        return [], [f"{key} = {_plain(export.override_kv, 'a models preset', ';#')}"]
    texts = (render_override_kv(argument_overrides(experts)) for experts in ("", export.experts_used))
    own, counted = (f"{key} = {text}" for text in texts)
    return [own], [counted]


def _router(export: Export) -> ServerCommand:
    """The router's command: it listens where the exported server would, and hands the library to its servers."""
    env = {key: value for key, value in export.command.env.items() if key == PRELOAD_ENV}
    where = [word for option in sorted(_OF_ROUTER) for word in (option, _value(export.command.argv, option))]
    return ServerCommand(env, (export.command.argv[0], "--models-preset", PRESET, *where))


def parse_ini(text: str, facts: ModelFacts) -> Schedule:
    """The schedule of the entry that is not the baseline. Raises ``ValueError`` where there is not exactly one.

    The comment is read too: counts per block are nothing without the library in the router's command.
    """
    _, marked, rest = text.partition(f"{_ROUTER_COMMENT}\n# ")
    router = ServerCommand.from_shell(rest.partition("\n")[0] if marked else "")
    sections: dict[str, list[str]] = {}
    current: list[str] = []
    for raw in text.splitlines():
        line = re.sub(r"[ \t]*[;#].*", "", raw)
        if header := re.fullmatch(r"\[[ \t]*([^]]+?)[ \t]*\][ \t]*", line):
            current = sections.setdefault(header[1], [])
        elif pair := re.fullmatch(r"[ \t]*([A-Za-z_][\w.-]*)[ \t]*=[ \t]*(.*?)[ \t]*", line, re.ASCII):
            current += [f"--{pair[1]}", pair[2]]
        elif line.strip():
            raise ValueError(f"{raw!r} is no line of a models preset")
    names = [name for name in sections if name != BASELINE]
    if len(names) != 1:
        raise ValueError(f"a preset with one schedule is wanted, and this has {len(names)}")
    return parse_server_command(ServerCommand(router.env, ("llama-server", *sections[names[0]])).shell(), facts)


# ---------------------------------------------------------------------------------------------------------------------
# A systemd user unit


def render_systemd(export: Export) -> str:
    """A unit for ``~/.config/systemd/user``. Quoting: ``man systemd.syntax``, ``systemd.service``, ``systemd.exec``."""
    described = "".join(mark if mark.isprintable() and mark not in "\\%" else "?" for mark in export.schedule.name)
    lines = [*_comment(export), "[Unit]", f"Description=llama-server, schedule {described}", "", "[Service]"]
    lines += [f"Environment={_unit_word(f'{key}={value}')}" for key, value in export.command.env.items()]
    # env(1) finds the program on the PATH of the user's session; systemd itself would look in fixed folders only.
    words = (_unit_word(word).replace("$", "$$") for word in _argv(export))
    lines += [f"ExecStart=/usr/bin/env {' '.join(words)}", "Restart=on-failure", ""]
    return "\n".join([*lines, "[Install]", "WantedBy=default.target"]) + "\n"


def parse_systemd(text: str, facts: ModelFacts) -> Schedule:
    """The schedule that a unit runs. Raises ``ValueError`` for a unit that was not rendered here."""
    env: dict[str, str] = {}
    argv: list[str] = []
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if not equals or line.startswith("#"):
            continue
        if key == "Environment":
            name, _, content = _unit_words(value)[0].partition("=")
            env[name] = content
        elif key == "ExecStart":
            argv = [word.replace("$$", "$") for word in _unit_words(value)[1:]]
    if not argv:
        raise ValueError("the unit has no ExecStart")
    return parse_server_command(ServerCommand(env, tuple(argv)).shell(), facts)


def _unit_word(word: str) -> str:
    escaped = _plain(word, "a unit").replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def _unit_words(line: str) -> list[str]:
    words = re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', line)
    return [bare or re.sub(r"\\(.)", r"\1", quoted).replace("%%", "%") for quoted, bare in words]


# ---------------------------------------------------------------------------------------------------------------------
# A docker compose service


def render_compose(export: Export) -> str:
    """A service on the official image, with model and library mounted. ``$`` is doubled: compose puts variables in."""
    argv, env = _argv(export)[1:], dict(export.command.env)
    port = _value(argv, "--port")
    model = _value(argv, "--model")
    inside = _MODEL_FOLDER / PurePosixPath(model).name
    argv[argv.index("--model") + 1] = str(inside)
    argv[argv.index("--host") + 1] = "0.0.0.0"  # noqa: S104 - of the container; the port is published on loopback
    mounts = [_mount(model, inside)]
    if PRELOAD_ENV in env:
        mounts.append(_mount(env[PRELOAD_ENV], _LIBRARY))
        env[PRELOAD_ENV] = str(_LIBRARY)
    service: dict[str, object] = {
        "image": IMAGE,
        "command": [_dollars(_plain(word, "a compose file")) for word in argv],
        "environment": {key: _dollars(value) for key, value in env.items()},
        "volumes": mounts,
        "ports": [f"127.0.0.1:{port}:{port}"],
        "restart": "unless-stopped",
    }
    comment = _comment(export)
    if env:
        comment.append("# the library must be built against a C library no newer than the image's")
    return "\n".join(comment) + "\n" + render_yaml({"services": {"llama-server": service}})


def parse_compose(text: str, facts: ModelFacts) -> Schedule:
    """The schedule that a service runs. Raises ``ValueError`` for a file that was not rendered here."""
    document = parse_yaml(text, "compose file")
    try:
        service = document["services"]["llama-server"]  # type: ignore[index]
        env = {key: value.replace("$$", "$") for key, value in service["environment"].items()}
        argv = [word.replace("$$", "$") for word in service["command"]]
    except (KeyError, TypeError, AttributeError):
        raise ValueError("this is no compose file with a service llama-server") from None
    return parse_server_command(ServerCommand(env, ("llama-server", *argv)).shell(), facts)


def _mount(source: str, target: PurePosixPath) -> dict[str, object]:
    path = _dollars(_plain(source, "a compose file"))
    return {"type": "bind", "source": path, "target": _dollars(str(target)), "read_only": True}


def _dollars(text: str) -> str:
    return text.replace("$", "$$")


def _value(argv: Sequence[str], option: str) -> str:
    return argv[argv.index(option) + 1]


# ---------------------------------------------------------------------------------------------------------------------
# A Python snippet


def render_python(export: Export) -> str:
    """A program that runs the schedule in process, under attestation, with the settings of the export."""
    argv = _argv(export)
    placement = parse_placement(argv)
    threads = int(_value(argv, "--threads")) if "--threads" in argv else None
    kv_type = _value(argv, "--cache-type-k") if "--cache-type-k" in argv else "f16"
    counts = dict(parse_experts(export.experts_used))
    # The first line settles the encoding: a name in the comment cannot choose another.
    lines = ["# -*- coding: utf-8 -*-", *_comment(export)]
    lines += [
        "from pathlib import Path",
        "",
        "from routing_lab.placement import Placement",
        "from routing_lab.runtime import RuntimeOptions, open_runtime",
        "from routing_lab.schedule import Schedule",
        "",
        f"schedule = Schedule.from_counts({export.schedule.name!r}, {counts!r})",
        f"placement = Placement.from_yaml({placement.to_yaml()!r})",
        "options = RuntimeOptions(",
        f"    threads={threads!r},",
        f"    context_tokens={int(_value(argv, '--ctx-size'))},",
        f"    kv_type={kv_type!r},",
        "    placement=placement,",
        f"    rpc_servers={tuple(_value(argv, '--rpc').split(',')) if '--rpc' in argv else ()!r},",
        ")",
        f"with open_runtime(Path({_value(argv, '--model')!r}), options) as runtime:",
        "    print(dict(runtime.apply(schedule).selected))  # read back from the running graph",
    ]
    return "\n".join(lines) + "\n"


def parse_python(text: str, facts: ModelFacts) -> Schedule:
    """The schedule that a snippet makes. Nothing is run. Raises ``ValueError`` for a snippet without one."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"this is no Python: {error.msg}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Schedule.from_counts":
            name, counts = (ast.literal_eval(argument) for argument in node.args)
            schedule = Schedule.from_counts(name, counts)
            schedule.resolve(facts)
            return schedule
    raise ValueError("the snippet makes no schedule")


FORMATS: Final[Mapping[str, Callable[[Export], str]]] = {
    "shell": Export.text,
    "ini": render_ini,
    "systemd": render_systemd,
    "compose": render_compose,
    "python": render_python,
}
"""Name of each form -> its renderer."""

PARSERS: Final[Mapping[str, Callable[[str, ModelFacts], Schedule]]] = {
    "ini": parse_ini,
    "systemd": parse_systemd,
    "compose": parse_compose,
    "python": parse_python,
}
"""Name of each form but ``shell`` (whose parser is ``overrides.parse_server_command``) -> its parser."""
