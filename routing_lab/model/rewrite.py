"""Copies a model with other metadata: what is not named in the changes stays as it was, byte for byte."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

from routing_lab.errors import Problem, UserFileError
from routing_lab.files import open_file
from routing_lab.model.facts import ModelFacts, read_shards
from routing_lab.model.gguf_header import GgufHeader, aligned

__all__ = ["Changes", "copy_model", "stored_counts"]

Changes: TypeAlias = Mapping[str, int | str | Sequence[int]]
"""Metadata key -> its new value: a number or an array of numbers (32 bits, unsigned), or a text."""

_CHUNK_BYTES: Final = 4 * 1024 * 1024
_UINT32, _TEXT, _ARRAY = 4, 8, 9  # value types of the format
_COUNT_AT, _ENTRIES_AT = 16, 24  # of the metadata: how many entries, and the first one


def stored_counts(facts: ModelFacts) -> tuple[int, ...]:
    """The count that the file names for each stored block, routed or not."""
    ((_, header), *_) = read_shards(facts.files[0])
    told = header.metadata[f"{facts.architecture}.expert_used_count"]
    return told if isinstance(told, tuple) else (told,) * facts.blocks  # type: ignore[return-value] # facts are checked


def copy_model(
    facts: ModelFacts,
    targets: Sequence[Path],
    changes: Changes,
    *,
    weights: bool = True,
    on_progress: Callable[[int], None] = lambda _count: None,
) -> str:
    """Write the files of a model to ``targets``, one for each, with ``changes`` in the first, which has the metadata.

    A key that is not there is added. Memory does not grow with the model. Without ``weights`` the data of all tensors
    are a hole, which takes no room on most disks and reads as zeros: such a model has the same graph. ``on_progress``
    gets the number of bytes of every piece that was written.

    Returns the digest of the copy, as ``model_digest`` would give it; an empty text without ``weights``.

    Raises ``UserFileError`` where a source cannot be read or changes meanwhile, ``OSError`` where a target cannot be
    written. What was written stays then.
    """
    digest = hashlib.sha256()
    shards = read_shards(facts.files[0])
    for (source, header), target in zip(shards, targets, strict=True):
        with target.open("xb", buffering=0) as file:
            for piece in _pieces(source, header, changes if source == facts.files[0] else {}, weights=weights):
                _write_all(file, piece)
                digest.update(piece)
                on_progress(len(piece))
            if not weights:
                file.truncate(file.tell() + _data_bytes(header))
            os.fsync(file.fileno())
    return f"sha256:{digest.hexdigest()}" if weights else ""


def _data_bytes(header: GgufHeader) -> int:
    return max(0, header.size_bytes - aligned(header.end, header.alignment))


def _pieces(source: Path, header: GgufHeader, changes: Changes, *, weights: bool) -> Iterator[bytes | memoryview]:
    """The bytes of the copy in order; each piece is good until the next one is asked for."""
    window = memoryview(bytearray(_CHUNK_BYTES))
    read_bytes = 0
    try:
        with open_file(source, buffering=0) as file:
            yield _new_header(file.read(header.end), header, changes)
            file.seek(aligned(header.end, header.alignment))
            while weights and (size := file.readinto(window)):  # type: ignore[attr-defined] # of every binary file
                read_bytes += size
                yield window[:size]
    except OSError as error:
        raise UserFileError(str(source), [Problem("", f"cannot be read: {error.strerror or error}")]) from None
    if weights and read_bytes != _data_bytes(header):
        raise UserFileError(
            str(source), [Problem("", "changed while it was copied", "wait until nothing writes to it")]
        )


def _new_header(old: bytes, header: GgufHeader, changes: Changes) -> bytes:
    """The header up to the data. The places of tensors count from where the data begin, so they stay right."""
    last = max((end for _, end in header.places.values()), default=_ENTRIES_AT)
    added = [key for key in changes if key not in header.places]
    parts = [old[:_COUNT_AT], struct.pack("<Q", len(header.places) + len(added))]
    position = _ENTRIES_AT
    for key, (start, end) in sorted(header.places.items(), key=lambda entry: entry[1]):
        if key in changes:
            parts += [old[position:start], _entry(key, changes[key])]
            position = end
    parts += [old[position:last], *(_entry(key, changes[key]) for key in added), old[last:]]
    new = b"".join(parts)
    return new.ljust(aligned(len(new), header.alignment), b"\0") if header.size_bytes > header.end else new


def _entry(key: str, value: int | str | Sequence[int]) -> bytes:
    """A metadata entry as it stands in a file. Raises ``struct.error`` for a number that 32 bits do not hold."""
    name = _text(key)
    if isinstance(value, str):
        return name + struct.pack("<I", _TEXT) + _text(value)
    if isinstance(value, int):
        return name + struct.pack("<II", _UINT32, value)
    return name + struct.pack(f"<IIQ{len(value)}I", _ARRAY, _UINT32, len(value), *value)


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "replace")
    return struct.pack("<Q", len(raw)) + raw


def _write_all(file: BinaryIO, piece: bytes | memoryview) -> None:
    left = memoryview(piece)
    while left:
        left = left[file.write(left) :]
