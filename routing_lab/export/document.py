"""From a certificate to what a server is started with; a schedule without one leaves the lab only with a label on it.

``export`` makes one ``Export``; its text and its JSON say the same. The text is a shell script whose only command is
the llama-server call: everything else in it is a comment or a variable. Other forms (a models preset, a service unit, a
snippet) are further renderings of the same ``Export``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from routing_lab.certificate import Certificate
from routing_lab.errors import RuntimeUnsupportedError, UsageError
from routing_lab.model import FrozenMap, ModelFacts, model_digest
from routing_lab.overrides import (
    ServerCommand,
    preload_environment,
    render_override_kv,
    server_command,
    stock_override,
)
from routing_lab.placement import Placement
from routing_lab.schedule import Schedule

__all__ = ["UNVALIDATED", "Export", "ServerSettings", "export"]

UNVALIDATED: Final = "UNVALIDATED"
"""The word that every rendering of an export without a certificate carries."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the server is to run: ``context_tokens`` are shared by its slots, ``threads`` ``None`` is its own choice.

    ``rpc_servers`` (``host:port``) lend their devices. ``program`` is the server's name, or its path.
    """

    placement: Placement = Placement()  # noqa: RUF009 - frozen
    context_tokens: int = 4096
    threads: int | None = None
    kv_type: str = "f16"
    parallel: int = 1
    host: str = "127.0.0.1"
    port: int = 8080
    rpc_servers: tuple[str, ...] = ()
    program: str = "llama-server"

    @classmethod
    def of(cls, certificate: Certificate) -> ServerSettings:
        """The settings under which the certificate was earned, on one slot as there."""
        options = certificate.options
        return cls(
            certificate.placement,
            options.context_tokens,
            options.threads,
            options.kv_type,
            rpc_servers=options.rpc_servers or (),
        )

    @property
    def flags(self) -> tuple[str, ...]:
        """The settings that ``server_command`` has no word for, as llama-server flags."""
        cache = () if self.kv_type == "f16" else ("--cache-type-k", self.kv_type, "--cache-type-v", self.kv_type)
        return (*cache, *(("--rpc", ",".join(self.rpc_servers)) if self.rpc_servers else ()))


@dataclass(frozen=True, slots=True)
class Export:
    """One schedule in the forms a server understands.

    ``environment`` is the form for the preload library; empty where that library was not built. ``override_kv`` is the
    stock form, ``None`` where the schedule has none, and ``no_override_kv`` then says why. ``notes`` are the ways in
    which the server differs from what was validated.
    """

    schedule: Schedule
    experts_used: str
    certificate: Certificate | None
    certificate_file: str | None
    environment: Mapping[str, str]
    override_kv: str | None
    no_override_kv: str | None
    command: ServerCommand
    notes: tuple[str, ...] = ()

    @property
    def validated(self) -> bool:
        """Whether a certificate covers this schedule on this model."""
        return self.certificate is not None

    @property
    def label(self) -> str:
        """Who says that this schedule may be used: ``validated by FILE of DATE``, or that nobody does."""
        if self.certificate is None:
            return f"{UNVALIDATED}: no certificate covers this schedule on this model"
        return f"validated by {self.certificate_file or 'a certificate'} of {self.certificate.created}"

    def text(self) -> str:
        """A shell script, newline at its end. Of an unvalidated export each line worth copying carries the label."""
        tag = "" if self.validated else f"  # {UNVALIDATED}"
        lines = [f"schedule {self.schedule.name}: {self.experts_used}", self.label, *self._claims(), *self.notes]
        script = list(map(_comment, lines))
        if self.environment:
            script += ["", "# for the preload library (environment)"]
            script += [f"{key}={shlex.quote(value)}{tag}" for key, value in self.environment.items()]
        stock = f"--override-kv {self.override_kv}{tag}" if self.override_kv else f"none: {self.no_override_kv}"
        script += ["", "# for an unmodified server (stock form)", _comment(stock)]
        script += ["", "# the whole command", f"{self.command.shell()}{tag}"]
        return "\n".join(script) + "\n"

    def _claims(self) -> list[str]:
        """What the certificate promises, in two lines."""
        if self.certificate is None:
            return []
        speed, gate, holdout = self.certificate.speed, self.certificate.gate, self.certificate.holdout
        answers = f"gate {gate.passed}/{gate.total}, holdout {holdout.candidate_correct}/{holdout.n}"
        baseline = f"baseline {holdout.baseline_correct}/{holdout.n}"
        return [
            f"model {self.certificate.model.file} {self.certificate.model.digest}",
            f"speed ratio {speed.ratio:.3f} [{speed.low:.3f}, {speed.high:.3f}], {answers} ({baseline})",
        ]

    def to_dict(self) -> dict[str, Any]:
        """The export as JSON can hold it."""
        return {
            "schedule": self.schedule.name,
            "experts_used": self.experts_used,
            "validated": self.validated,
            "label": self.label,
            "certificate": None if self.certificate is None else self._certificate_dict(self.certificate),
            "environment": dict(self.environment),
            "override_kv": self.override_kv,
            "no_override_kv": self.no_override_kv,
            "command": {
                "env": dict(self.command.env),
                "argv": list(self.command.argv),
                "shell": self.command.shell(),
            },
            "notes": list(self.notes),
        }

    def _certificate_dict(self, certificate: Certificate) -> dict[str, Any]:
        return {
            "file": self.certificate_file,
            "created": certificate.created,
            "digest": certificate.digest,
            "model_digest": certificate.model.digest,
            "speed_ratio": certificate.speed.ratio,
            "speed_ratio_low": certificate.speed.low,
            "speed_ratio_high": certificate.speed.high,
        }


def _comment(line: str) -> str:
    """A comment of a shell script: a line break in a name or a path would end it and begin a command."""
    return "# " + "".join(c if c.isprintable() else "?" for c in line)


def export(
    facts: ModelFacts,
    *,
    certificate: Certificate | None = None,
    certificate_file: Path | None = None,
    schedule: Schedule | None = None,
    unvalidated: bool = False,
    library: Path | None = None,
    settings: ServerSettings | None = None,
    port: int | None = None,
    rpc_servers: tuple[str, ...] = (),
    program: str | None = None,
) -> Export:
    """Export the schedule of a certificate, or another schedule that the caller takes the responsibility for.

    Args:
        facts: The model that the server will load; its bytes are compared with the certificate's digest.
        certificate: What validated the schedule.
        certificate_file: Where it lies, for the label.
        schedule: The schedule, where it is not simply the certificate's.
        unvalidated: Export a schedule that no certificate covers, with the label on it.
        library: The override library to preload (``None``: not built; only uniform schedules can be exported then).
        settings: How the server runs; by default as the certificate says.
        port: Where it listens, instead of where the settings say.
        rpc_servers: RPC servers that lend their devices, instead of those of the settings.
        program: The server's name or path, instead of that of the settings.

    Raises:
        UsageError: Neither certificate nor schedule; no certificate covers the schedule on this model (unless
            ``unvalidated``); or ``LD_PRELOAD`` cannot name the library.
        UserFileError: The schedule or the placement does not fit the model.
        RuntimeUnsupportedError: The counts differ between blocks and there is no library.
    """
    if schedule is None:
        if certificate is None:
            raise UsageError("there is nothing to export: give a certificate, or a schedule")
        schedule = certificate.schedule.schedule
    objection = _objection(schedule, facts, certificate)
    if objection is not None:
        if not unvalidated:
            raise UsageError(f"{objection}; validate it first, or say --unvalidated to export it with a label")
        certificate, certificate_file = None, None
    if settings is None:
        settings = ServerSettings() if certificate is None else ServerSettings.of(certificate)
    if port is not None:
        settings = replace(settings, port=port)
    if rpc_servers:
        settings = replace(settings, rpc_servers=rpc_servers)
    if program is not None:
        settings = replace(settings, program=program)
    return _render(schedule, facts, certificate, certificate_file=certificate_file, library=library, settings=settings)


def _objection(schedule: Schedule, facts: ModelFacts, certificate: Certificate | None) -> str | None:
    """Why the certificate does not cover the schedule on this model; ``None`` when it does."""
    if certificate is None:
        return f"no certificate covers schedule {schedule.name}"
    digest = model_digest(facts)
    if certificate.model.digest != digest:
        theirs = f"{certificate.model.file} ({certificate.model.digest})"
        return f"the certificate is about another model: {theirs}, not {facts.files[0].name} ({digest})"
    if not certificate.covers(schedule, facts, digest):
        ours = schedule.key(facts)
        return f"the certificate covers {certificate.schedule.experts_used}, not schedule {schedule.name} ({ours})"
    return None


def _render(
    schedule: Schedule,
    facts: ModelFacts,
    certificate: Certificate | None,
    *,
    certificate_file: Path | None,
    library: Path | None,
    settings: ServerSettings,
) -> Export:
    stock, no_stock = _stock_form(schedule, facts)
    try:
        environment = {} if library is None else preload_environment(schedule, facts, library)
        command = server_command(
            facts.files[0],
            schedule,
            facts,
            # A uniform schedule runs on any server; a library that need not be loaded cannot fail to load.
            library=None if stock is not None else library,
            placement=settings.placement,
            context_tokens=settings.context_tokens,
            threads=settings.threads,
            parallel=settings.parallel,
            host=settings.host,
            port=settings.port,
            extra=settings.flags,
            program=settings.program,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    return Export(
        schedule=schedule,
        experts_used=schedule.key(facts),
        certificate=certificate,
        certificate_file=None if certificate_file is None else str(certificate_file),
        environment=FrozenMap(environment),
        override_kv=stock,
        no_override_kv=no_stock,
        command=command,
        notes=() if certificate is None else tuple(_differences(settings, certificate)),
    )


def _stock_form(schedule: Schedule, facts: ModelFacts) -> tuple[str | None, str | None]:
    """The stock form, or the reason why there is none."""
    try:
        return render_override_kv([stock_override(schedule, facts)]), None
    except RuntimeUnsupportedError as error:
        return None, str(error)


def _differences(settings: ServerSettings, certificate: Certificate) -> list[str]:
    """Where the server will not run as the acceptance run did."""
    notes = []
    if settings.placement != certificate.placement:
        notes.append(f"placement differs from the certificate's ({certificate.placement.describe()}): other speeds")
    if settings.kv_type != certificate.options.kv_type:
        notes.append(f"KV cache differs from the certificate's ({certificate.options.kv_type}): answers may differ")
    if settings.parallel > 1:
        notes.append("validated one request at a time; batched decoding may turn a near-tie between two tokens")
    return notes
