"""A copy of a model with a schedule in its metadata, kept only where a runtime without the override library honours it.

llama.cpp takes an array of counts under ``ARCH.expert_used_count`` for every architecture, and nearly every one then
computes with half of it: the router selects as many experts as block 0 would, the sum adds up as many as the array says
(``docs/how-the-override-works.md``). So no copy leaves the lab that was not loaded and read back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from routing_lab.errors import (
    AttestationError,
    Problem,
    RuntimeFailureError,
    RuntimeUnsupportedError,
    UsageError,
    UserFileError,
)
from routing_lab.export.document import Export
from routing_lab.model import FrozenMap, ModelFacts, model_digest
from routing_lab.model.rewrite import Changes, copy_model, stored_counts
from routing_lab.overrides import OVERRIDE_KV, ServerCommand
from routing_lab.runtime.base import RuntimeOptions
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.schedule import Schedule, format_counts

__all__ = ["LABEL_KEY", "GgufCopy", "check_targets", "read_copy", "write_copy"]

LABEL_KEY: Final = "routing_lab.schedule"
"""The metadata key of a copy under which schedule, certificate and the digest of the original are named."""

_CONTEXT_TOKENS: Final = 256  # one token is decoded
_SUM_TOO_LONG: Final = "GGML_ASSERT(view_src == NULL"  # a view of an expert's output beyond those that are there
_HEADER_ROOM: Final = 2**20  # what a copy may be larger than its original
_SHARD = re.compile(r".+-00001-of-(\d{5})\.gguf", re.ASCII | re.DOTALL)

Progress = Callable[[str, int], None]
"""Gets what is being done, and how many bytes were written since the last call."""


@dataclass(frozen=True, slots=True)
class GgufCopy:
    """A copy that was kept. ``made`` is the export with the command that serves it, ``runtime`` what read it back."""

    made: Export
    files: tuple[Path, ...]
    digest: str
    size_bytes: int
    attested: Mapping[int, int]
    runtime: str

    def to_dict(self) -> dict[str, Any]:
        """The export as JSON can hold it, and the copy."""
        copy = {
            "files": [str(file) for file in self.files],
            "digest": self.digest,
            "size_bytes": self.size_bytes,
            "attested": format_counts(self.attested),
            "runtime": self.runtime,
        }
        return self.made.to_dict() | {"copy": copy}


# ---------------------------------------------------------------------------------------------------------------------
# What is written


def entries(made: Export, facts: ModelFacts) -> Changes:
    """The metadata that makes the schedule of ``made`` the model's own.

    A uniform schedule is one number, as ``--override-kv`` sets it: every llama.cpp honours that. Any other is an array
    with an entry for each stored block; one that the schedule cannot reach keeps its own count.
    """
    counts = made.schedule.resolve(facts)
    key = f"{facts.architecture}.expert_used_count"
    uniform = made.schedule.uniform_count(facts)
    if uniform is not None:
        return {key: uniform, LABEL_KEY: _label(made)}
    array = [counts.get(block, own) for block, own in enumerate(stored_counts(facts))]
    return {key: array, LABEL_KEY: _label(made)}


def _label(made: Export) -> str:
    label = f"{made.schedule.name} ({made.experts_used}), {made.label}"
    if made.certificate is None:
        return label
    return f"{label}: certificate {made.certificate.digest} on the original, {made.certificate.model.digest}"


def read_copy(path: Path, facts: ModelFacts) -> Schedule:
    """The schedule that a copy of the model ``facts`` has as its own counts.

    Raises ``UserFileError`` for a file that is no copy of it.
    """
    copy = ModelFacts.read(path)
    same = ("architecture", "blocks", "routed_blocks", "experts", "parameters")
    other = [name for name in same if getattr(copy, name) != getattr(facts, name)]
    if other:
        what = f"is no copy of {facts.files[0].name}: {', '.join(other)} differ"
        raise UserFileError(str(path), [Problem("", what)])
    return Schedule.from_counts(path.stem, copy.experts_used)


# ---------------------------------------------------------------------------------------------------------------------
# Where it is written


def check_targets(output: Path, facts: ModelFacts) -> tuple[Path, ...]:
    """The files of a copy that begins with ``output``.

    Raises:
        UsageError: One of them is there already, the model is split and ``output`` is no name of a first shard, or the
            disk has less room than the copy takes.
    """
    targets = _targets(output, facts)
    for target in targets:
        if os.path.lexists(target):
            raise UsageError(f"{target} is there already, and a copy of a model replaces nothing; name another file")
    with _reporting(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(output.parent).free
    if free < facts.size_bytes + _HEADER_ROOM:
        raise UsageError(f"{output} needs {_size(facts.size_bytes)} and its disk has {_size(free)} free")
    return targets


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"


def _targets(output: Path, facts: ModelFacts) -> tuple[Path, ...]:
    shards = len(facts.files)
    if shards == 1:
        return (output,)
    match = _SHARD.fullmatch(output.name)
    if match is None or int(match[1]) != shards:
        raise UsageError(
            f"{facts.files[0].name} is split into {shards} files, and so is its copy: name the first one of it, "
            f"as in copy-00001-of-{shards:05}.gguf"
        )
    ending = f"-of-{shards:05}.gguf"
    prefix = output.name.removesuffix(f"-00001{ending}")
    return tuple(output.with_name(f"{prefix}-{number:05}{ending}") for number in range(1, shards + 1))


@contextlib.contextmanager
def _folder_beside(output: Path) -> Iterator[Path]:
    """A folder on the disk of ``output`` that is gone at the end, with all that is left in it."""
    with _reporting(output):
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name[:100]}.", suffix=".tmp", dir=output.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _reporting(output: Path) -> Iterator[None]:
    """Turn what the system says about the output into ``UserFileError``."""
    try:
        yield
    except OSError as error:
        raise UserFileError(str(output), [Problem("", f"cannot be written: {error.strerror or error}")]) from None


def _move(written: Sequence[Path], targets: Sequence[Path]) -> None:
    """Give the files their names, the first one last: without it the others are no model. All of them, or none.

    Raises ``FileExistsError`` where a name was taken while the copy was written, which may be hours.
    """
    pairs = list(zip(written, targets, strict=True))
    try:
        for source, target in reversed(pairs):
            _rename_to_new(source, target)
    except BaseException:
        for source, target in pairs:
            if not source.exists() or (target.exists() and target.samefile(source)):
                target.unlink(missing_ok=True)
        raise


def _rename_to_new(source: Path, target: Path) -> None:
    try:
        os.link(source, target)  # unlike a rename it replaces nothing
    except FileExistsError:
        raise
    except OSError:  # a disk without links; the next best is to look
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        source.rename(target)
    else:
        source.unlink()


# ---------------------------------------------------------------------------------------------------------------------
# Writing and reading back


def write_copy(
    made: Export, facts: ModelFacts, output: Path, *, on_progress: Progress = lambda _doing, _count: None
) -> GgufCopy:
    """Write a copy of the model with the schedule of ``made`` in it, load it without the override, keep it if right.

    A copy without weights is tried first, so that a runtime which does not honour the counts costs no copying. Whatever
    goes wrong, nothing is left behind.

    Raises:
        UsageError: See ``check_targets``.
        UserFileError: The model cannot be read, or the copy cannot be written.
        RuntimeUnsupportedError: There is no libllama, or it does not honour the counts, or it cannot load the copy.
        RuntimeFailureError: The model's process died.
    """
    targets = check_targets(output, facts)
    changes = entries(made, facts)
    wanted = made.schedule.resolve(facts)
    with _folder_beside(output) as folder:
        if made.override_kv is None:
            on_progress("trying the counts on a copy without weights", 0)
            trial = _files_in(folder / "trial", targets)
            with _reporting(output):
                copy_model(facts, trial, changes, weights=False)
            _attest(trial[0], wanted, facts)
            shutil.rmtree(folder / "trial")
        doing = "writing the copy"
        on_progress(doing, 0)
        written = _files_in(folder / "copy", targets)
        with _reporting(output):
            digest = copy_model(facts, written, changes, on_progress=lambda count: on_progress(doing, count))
        _require_certified(made, facts)
        on_progress("reading its counts back", 0)
        runtime = _attest(written[0], wanted, facts)
        size_bytes = sum(file.stat().st_size for file in written)
        with _reporting(output):
            _move(written, targets)
    return GgufCopy(_served(made, targets[0], digest, runtime), targets, digest, size_bytes, FrozenMap(wanted), runtime)


def _require_certified(made: Export, facts: ModelFacts) -> None:
    """Refuse a copy of other bytes than the certificate's; they were compared before, and may have changed meanwhile.

    A file that kept its time of change is not read again.
    """
    if made.certificate is not None and model_digest(facts) != made.certificate.model.digest:
        problem = Problem("", "changed while it was copied", "validate it as it is now, and export it again")
        raise UserFileError(str(facts.files[0]), [problem])


def _files_in(folder: Path, targets: Sequence[Path]) -> list[Path]:
    folder.mkdir()
    return [folder / target.name for target in targets]


def _attest(path: Path, wanted: Mapping[int, int], facts: ModelFacts) -> str:
    """Load a copy without the override library and read its counts back; the name of the runtime that honours them."""
    try:
        with LlamaRuntime(path, RuntimeOptions(context_tokens=_CONTEXT_TOKENS, override="off")) as runtime:
            found = runtime.apply(Schedule.from_counts("copy", wanted))
            assert dict(found.selected) == dict(found.summed) == dict(wanted)  # noqa: S101 - apply compares them
            return runtime.build.version
    except AttestationError as error:
        raise _refusal(facts, str(error).removeprefix("attestation failed: ")) from None
    except RuntimeUnsupportedError as error:
        raise RuntimeUnsupportedError(f"no copy was kept: {str(error).replace(str(path), path.name)}") from None
    except RuntimeFailureError as error:
        if _SUM_TOO_LONG in error.log_tail:
            detail = "it ends with a failed assertion, as a block does that sums more experts than its router selects"
            raise _refusal(facts, detail) from None
        raise RuntimeFailureError(f"no copy was kept: {error}", error.log_tail) from None


def _refusal(facts: ModelFacts, detail: str) -> RuntimeUnsupportedError:
    return RuntimeUnsupportedError(
        "no copy was kept: this libllama does not honour a count per block from the file of a "
        f"{facts.architecture} model: {detail}; export it for the preload library (--format shell, systemd, compose, "
        "python), or take a uniform schedule"
    )


def _served(made: Export, copy: Path, digest: str, runtime: str) -> Export:
    """The export with the command that serves the copy, which needs no override: the counts are in the file."""
    argv = list(made.command.argv)
    argv[argv.index("--model") + 1] = str(copy)
    if OVERRIDE_KV in argv:
        position = argv.index(OVERRIDE_KV)
        del argv[position : position + 2]
    notes = [f"copy {copy} {digest}", f"its counts were read back without the override library on {runtime}"]
    if made.override_kv is None:
        notes.append("another llama.cpp may not honour them: read them back there, too")
    if made.certificate is not None:
        notes.append("the certificate is about the original, whose digest the copy does not have")
    return replace(
        made,
        environment=FrozenMap({}),
        override_kv=None,
        no_override_kv="the counts are in the file",
        command=ServerCommand(FrozenMap({}), tuple(argv)),
        notes=(*made.notes, *notes),
    )
