"""Reads the header of one GGUF file: metadata and the list of tensors, never tensor data.

The gguf package's own ``GGUFReader`` makes numpy arrays of every token of the vocabulary: 7 to 11 seconds and 520 MB of
memory for 152 000 tokens and as many merges, against 0.26 seconds and 35 MB here (import included, two cores
busy with other work). It also trusts every count and length it finds, so that a damaged file can make it raise nearly
anything, loop, or allocate without end. This reader keeps only what the facts need, checks each count and length
against the bytes that are there, and ends in ``CorruptHeaderError`` or a header.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the checks follow llama.cpp's ``ggml/src/gguf.cpp``,
so that a file which passes here is not refused there for its layout.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from routing_lab.files import open_file

__all__ = ["CorruptHeaderError", "GgufHeader", "TensorInfo", "aligned", "read_header"]

MAX_METADATA: Final = 1 << 16
MAX_TENSORS: Final = 1 << 18
MAX_TEXTS: Final = 1 << 22
"""Most texts in all arrays of a file: bounds the time for walking over them; vocabularies have less than 2**20."""
MAX_NAME_BYTES: Final = (1 << 16) - 1
MAX_KEPT_TEXT_BYTES: Final = 1 << 20
"""Longer texts are skipped and kept as an empty text; the longest chat templates have 2**15 bytes."""
MAX_KEPT_ARRAY: Final = 1 << 12
"""Longer arrays are skipped; per-block arrays have at most as many elements as llama.cpp has layers (512)."""
MAX_KEPT_BYTES: Final = 1 << 24
"""Most bytes of texts and arrays kept of one file: bounds memory where a sparse file claims thousands of long ones."""
MAX_DIMENSIONS: Final = 4
MAX_ELEMENTS: Final = (1 << 63) - 1
DEFAULT_ALIGNMENT: Final = 32

_SCALARS: Final[Mapping[int, str]] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_TEXT: Final = 8
_ARRAY: Final = 9


class CorruptHeaderError(Exception):
    """The file is no GGUF or a damaged one; the message says what was found where. Turned into a ``UserFileError``."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file. ``shape`` is in ggml's order: the first dimension is the contiguous one."""

    name: str
    shape: tuple[int, ...]
    type: str
    elements: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata (texts, numbers, short arrays of numbers as tuples, other arrays as ``None``) and tensors of a file.

    ``places`` says where in the file each metadata entry begins and ends. The header, list of tensors included, ends at
    ``end``; the tensors' data begin at the next multiple of ``alignment``.
    """

    metadata: Mapping[str, object]
    tensors: tuple[TensorInfo, ...]
    size_bytes: int
    places: Mapping[str, tuple[int, int]]
    end: int
    alignment: int


def read_header(path: Path) -> GgufHeader:
    """The header of ``path``. Raises ``CorruptHeaderError``, or ``OSError`` where it cannot be read or is no file."""
    with open_file(path) as file:
        size_bytes = file.seek(0, 2)
        file.seek(0)
        reader = _Reader(file, size_bytes)
        tensor_count, metadata_count = _read_preamble(reader)
        metadata, places = _read_metadata(reader, metadata_count)
        alignment = _alignment(metadata)
        tensors = _read_tensors(reader, tensor_count, alignment)
    return GgufHeader(metadata, tensors, size_bytes, places, reader.position, alignment)


class _Reader:
    """Bounded reading: every length is checked against what is left of the file before anything is allocated."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file = file
        self.size_bytes = size_bytes
        self.position = 0
        self.texts_left = MAX_TEXTS
        self.kept_left = MAX_KEPT_BYTES

    def take(self, size: int, what: str) -> bytes:
        self._claim(size, what)
        raw = self._file.read(size)
        if len(raw) != size:  # the file shrank while it was read
            raise CorruptHeaderError(f"ends within {what}")
        return raw

    def keep(self, size: int, what: str) -> bytes:
        """``take`` for values that stay in memory: all of them together are bounded."""
        self.kept_left -= size
        if self.kept_left < 0:
            raise CorruptHeaderError(f"holds more than {MAX_KEPT_BYTES} bytes of metadata up to {what}")
        return self.take(size, what)

    def skip(self, size: int, what: str) -> None:
        self._claim(size, what)
        self._file.seek(size, 1)

    def number(self, form: str, what: str) -> int:
        number: int = struct.unpack(form, self.take(struct.calcsize(form), what))[0]
        return number

    def name(self, what: str) -> str:
        length = self.number("<Q", f"the length of {what}")
        if length > MAX_NAME_BYTES:
            raise CorruptHeaderError(f"{what} claims a length of {length} bytes")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise CorruptHeaderError(f"{what} is no UTF-8 text") from None

    def text(self, what: str) -> str:
        length = self.number("<Q", f"the length of {what}")
        if length > MAX_KEPT_TEXT_BYTES:
            self.skip(length, what)
            return ""
        return self.keep(length, what).decode("utf-8", errors="replace")

    def skip_texts(self, count: int, what: str) -> None:
        if count > self.texts_left:
            raise CorruptHeaderError(f"{what} claims {count} texts, more than any vocabulary has")
        self.texts_left -= count
        for _ in range(count):
            self.skip(self.number("<Q", what), what)

    def _claim(self, size: int, what: str) -> None:
        left = self.size_bytes - self.position
        if size > left:
            raise CorruptHeaderError(f"ends within {what}: {size} more bytes are needed, {left} are there")
        self.position += size


def _read_preamble(reader: _Reader) -> tuple[int, int]:
    """Check magic and version; returns the number of tensors and of metadata entries."""
    if reader.size_bytes == 0:
        raise CorruptHeaderError("is empty")
    magic = reader.take(min(4, reader.size_bytes), "the first four bytes")
    if magic != b"GGUF":
        raise CorruptHeaderError(f"is no GGUF file (it starts with {magic!r})")
    version = reader.number("<I", "the version")
    if version and not version & 0xFFFF:
        raise CorruptHeaderError("is a big-endian GGUF file; only little-endian ones are supported")
    if version not in {2, 3}:
        raise CorruptHeaderError(f"has GGUF version {version}; versions 2 and 3 are supported")
    tensor_count = reader.number("<Q", "the number of tensors")
    metadata_count = reader.number("<Q", "the number of metadata entries")
    if tensor_count > MAX_TENSORS or metadata_count > MAX_METADATA:
        raise CorruptHeaderError(f"claims {tensor_count} tensors and {metadata_count} metadata entries")
    return tensor_count, metadata_count


def _read_metadata(reader: _Reader, count: int) -> tuple[dict[str, object], dict[str, tuple[int, int]]]:
    metadata: dict[str, object] = {}
    places: dict[str, tuple[int, int]] = {}
    for index in range(count):
        start = reader.position
        key = reader.name(f"the key of metadata entry {index}")
        if key in metadata:
            raise CorruptHeaderError(f"has the metadata key {key!r} twice")
        metadata[key] = _read_value(reader, reader.number("<I", f"the type of {key!r}"), f"metadata {key!r}")
        places[key] = start, reader.position
    return metadata, places


def _read_value(reader: _Reader, kind: int, what: str) -> object:
    if kind == _TEXT:
        return reader.text(what)
    if kind == _ARRAY:
        return _read_array(reader, what)
    if kind not in _SCALARS:
        raise CorruptHeaderError(f"{what} has the unknown value type {kind}")
    return reader.number(_SCALARS[kind], what)


def _read_array(reader: _Reader, what: str) -> object:
    kind = reader.number("<I", f"the type of {what}")
    count = reader.number("<Q", f"the length of {what}")
    if kind == _TEXT:
        reader.skip_texts(count, what)
        return None
    if kind not in _SCALARS:
        raise CorruptHeaderError(f"{what} is an array of the unknown value type {kind}")
    size = count * struct.calcsize(_SCALARS[kind])
    if count > MAX_KEPT_ARRAY:
        reader.skip(size, what)
        return None
    return struct.unpack(f"<{count}{_SCALARS[kind][1]}", reader.keep(size, what))


def _alignment(metadata: Mapping[str, object]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment <= 0 or alignment & (alignment - 1):
        raise CorruptHeaderError(f"general.alignment is {alignment!r}, not a power of two")
    return alignment


def _read_tensors(reader: _Reader, count: int, alignment: int) -> tuple[TensorInfo, ...]:
    """The tensor list; their data must lie one after the other, each start aligned, and end before the file does."""
    tensors: dict[str, TensorInfo] = {}
    expected_offset = 0
    end_bytes = 0
    for index in range(count):
        tensor, offset = _read_tensor(reader, index)
        if tensor.name in tensors:
            raise CorruptHeaderError(f"has the tensor {tensor.name!r} twice")
        if offset != expected_offset:
            raise CorruptHeaderError(
                f"tensor {tensor.name!r} lies at offset {offset} of the data, not {expected_offset}"
            )
        tensors[tensor.name] = tensor
        end_bytes = offset + tensor.size_bytes
        expected_offset = aligned(end_bytes, alignment)
    needed_bytes = aligned(reader.position, alignment) + end_bytes if tensors else 0
    if needed_bytes > reader.size_bytes:
        raise CorruptHeaderError(
            f"is cut off (an unfinished download?): its tensors need {needed_bytes} bytes, it has {reader.size_bytes}"
        )
    return tuple(tensors.values())


def _read_tensor(reader: _Reader, index: int) -> tuple[TensorInfo, int]:
    name = reader.name(f"the name of tensor {index}")
    what = f"tensor {name!r}"
    dimensions = reader.number("<I", what)
    if dimensions > MAX_DIMENSIONS:
        raise CorruptHeaderError(f"{what} claims {dimensions} dimensions")
    shape = tuple(reader.number("<Q", what) for _ in range(dimensions))
    elements = math.prod(shape)
    if elements > MAX_ELEMENTS:
        raise CorruptHeaderError(f"{what} claims the shape {shape}")
    type_number = reader.number("<I", what)
    offset = reader.number("<Q", what)
    if type_number not in _tensor_types():
        remedy = "a newer gguf package may know it" if type_number < 1 << 16 else "the file is damaged"
        raise CorruptHeaderError(f"{what} has the unknown type {type_number} ({remedy})")
    type_name, block_elements, block_bytes = _tensor_types()[type_number]
    if shape and shape[0] % block_elements:
        raise CorruptHeaderError(
            f"{what} has rows of {shape[0]} elements; {type_name} needs multiples of {block_elements}"
        )
    return TensorInfo(name, shape, type_name, elements, elements // block_elements * block_bytes), offset


@functools.cache
def _tensor_types() -> Mapping[int, tuple[str, int, int]]:
    """Number of each ggml type -> name, elements per quantisation block, bytes per quantisation block."""
    from gguf.constants import GGML_QUANT_SIZES  # brings numpy with it, and only files need it

    return {int(kind): (kind.name, elements, size) for kind, (elements, size) in GGML_QUANT_SIZES.items()}


def aligned(position: int, alignment: int) -> int:
    """The next multiple of ``alignment``, ``position`` itself where it is one."""
    return (position + alignment - 1) // alignment * alignment
