"""Is the runtime usable here? Tries everything on a real model and reports what it found, without raising."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from routing_lab.errors import RoutingLabError
from routing_lab.model import ModelFacts
from routing_lab.runtime.base import Capability, RuntimeOptions
from routing_lab.runtime.libllama import Device
from routing_lab.runtime.llama import LlamaRuntime, available_cores, libllama_path
from routing_lab.runtime.server import ServerRuntime
from routing_lab.runtime.server_binary import find_server
from routing_lab.schedule import Schedule

__all__ = ["DoctorReport", "examine", "mixed_schedule"]

_LOW_MEMORY_SHARE = 1.2  # weights plus cache and buffers of a small context


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What ``examine`` found; every field survives ``dataclasses.asdict`` and JSON. Memory in bytes.

    ``attested`` holds, for a schedule with two different counts, block -> experts that the running graph consulted.
    ``None`` stands for what could not be found out.
    """

    platform: str
    cores: int
    memory_total_bytes: int | None
    memory_available_bytes: int | None
    library: str | None
    version: str | None
    system_info: str | None
    override_library: str | None
    override: Literal["attested", "unsupported"]
    capability: str | None
    reason: str | None
    model: str
    attested: Mapping[int, int] | None
    devices: tuple[Device, ...]
    warnings: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """Whether a model can be run at all (a uniform schedule needs no override)."""
        return self.capability is not None


def mixed_schedule(facts: ModelFacts) -> Schedule:
    """The model's own counts in every other routed block, one less (or more, for one) in between.

    A library that ignores the schedule, shifts it by a block or applies one count to all cannot attest it.
    """
    own = facts.experts_used
    counts = {
        block: (own[block] - 1 or 2) if index % 2 else own[block] for index, block in enumerate(facts.routed_blocks)
    }
    return Schedule.from_counts("doctor-mixed", counts)


def examine(
    model: Path,
    options: RuntimeOptions | None = None,
    *,
    runtime: Literal["llama", "server"] = "llama",
    binary: Path | None = None,
) -> DoctorReport:
    """Load ``model``, switch it to a mixed schedule and say what works here.

    ``binary`` is the llama-server to try, for the runtime ``server``. Never raises for a broken set-up: that is what it
    reports.
    """
    options = options or RuntimeOptions(context_tokens=512)
    total, available = _memory()
    report = DoctorReport(
        platform=f"{platform.system()} {platform.machine()}",
        cores=available_cores(),
        memory_total_bytes=total,
        memory_available_bytes=available,
        library=None,
        version=None,
        system_info=None,
        override_library=None,
        override="unsupported",
        capability=None,
        reason=None,
        model=str(model),
        attested=None,
        devices=(),
        warnings=(),
    )
    try:
        library = find_server(binary).libllama if runtime == "server" else libllama_path(options.library_dir)
        report = replace(report, library=str(library))
        opened = ServerRuntime(model, options, binary=binary) if runtime == "server" else LlamaRuntime(model, options)
        with opened:
            return _try_override(_described(report, opened), opened)
    except RoutingLabError as error:
        return replace(report, reason=str(error))


def _described(report: DoctorReport, runtime: LlamaRuntime | ServerRuntime) -> DoctorReport:
    return replace(
        report,
        library=runtime.build.library,
        version=runtime.build.version,
        system_info=runtime.build.system_info,
        override_library=str(runtime.override) if runtime.override else None,
        capability=str(runtime.capability),
        devices=runtime.devices,
        warnings=tuple(_warnings(report, runtime)),
    )


def _try_override(report: DoctorReport, runtime: LlamaRuntime | ServerRuntime) -> DoctorReport:
    if runtime.capability is not Capability.PRELOAD:
        return replace(report, reason=runtime.no_override_reason)
    if not runtime.facts.is_moe:
        return replace(report, reason=f"{runtime.facts.name} has no routed experts, so there is nothing to override")
    try:
        attestation = runtime.apply(mixed_schedule(runtime.facts))
    except RoutingLabError as error:
        return replace(report, reason=str(error))
    return replace(report, override="attested", attested=dict(attestation.selected))


def _warnings(report: DoctorReport, runtime: LlamaRuntime | ServerRuntime) -> list[str]:
    warnings = []
    available = report.memory_available_bytes
    if available is not None and available < _LOW_MEMORY_SHARE * runtime.facts.size_bytes:
        warnings.append(
            f"{available / 1e9:.1f} GB of memory are available and the model's files take "
            f"{runtime.facts.size_bytes / 1e9:.1f} GB: weights will be read from disk while it decodes"
        )
    load, cores = os.getloadavg()[0], report.cores
    if load > 0.5 * cores:
        warnings.append(f"other processes keep {load:.1f} of {cores} cores busy: decode rates will be noisy")
    if any("gpu" in device.kind for device in runtime.devices) and runtime.options.placement.gpu_layers == 0:
        warnings.append("a GPU is there and the placement puts no layer on it")
    return warnings


def _memory() -> tuple[int | None, int | None]:
    """Total and available memory in bytes, where the system tells (Linux)."""
    try:
        rows = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None, None
    kibibytes = {name: int(rest.split()[0]) for name, rest in (row.split(":", 1) for row in rows)}
    total, available = (kibibytes.get(name) for name in ("MemTotal", "MemAvailable"))
    return (total * 1024 if total is not None else None), (available * 1024 if available is not None else None)
