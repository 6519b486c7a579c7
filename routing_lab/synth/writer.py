"""Write a model of random weights as a GGUF file, in memory that does not grow with the file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from routing_lab.errors import Problem, UsageError, UserFileError
from routing_lab.synth.shapes import Shape
from routing_lab.synth.tokenizer import add_tokenizer
from routing_lab.synth.weights import WeightType, tensor_bytes, tensor_chunks

if TYPE_CHECKING:
    from gguf import GGUFWriter

__all__ = ["check_room", "model_name", "weight_bytes", "write_model"]

_ALIGNMENT: Final = 32
_LONGEST_NAME: Final = 240  # bytes, of the 255 that file systems take
_HEADER_ROOM: Final = 16 * 2**20  # a vocabulary of a quarter of a million tokens takes 6 MB


def weight_bytes(shape: Shape, kind: WeightType) -> int:
    """Bytes of all tensors in a file of this type; metadata adds a few megabytes at most."""
    return sum(-(-tensor_bytes(tensor, kind) // _ALIGNMENT) * _ALIGNMENT for tensor in shape.tensors())


def model_name(shape: Shape, kind: WeightType, seed: int) -> str:
    """What the file calls itself: it names everything that decides its bytes."""
    return (
        f"random {shape.name} ({shape.blocks} blocks, {shape.experts} experts, embedding {shape.embedding_length}, "
        f"vocabulary {shape.vocabulary}, {kind}, seed {seed})"
    )


def check_room(path: Path, shape: Shape, kind: WeightType) -> None:
    """Find out before the work that the file does not fit.

    Raises:
        UsageError: The disk has less room than the file takes.
    """
    needed, free = weight_bytes(shape, kind) + _HEADER_ROOM, shutil.disk_usage(path.parent).free
    if free < needed:
        raise UsageError(
            f"{path} needs {needed / 2**30:.1f} GiB and its disk has {free / 2**30:.1f} GiB free; "
            "fewer blocks or experts, or less width, make it smaller"
        )


def write_model(
    path: Path,
    shape: Shape,
    kind: WeightType = "q4_0",
    seed: int = 1,
    *,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Write the model to ``path``, atomically: an existing file is replaced only when the new one is complete.

    Equal arguments give equal bytes. ``on_progress`` gets the number of bytes of every piece that was written.

    Raises:
        UsageError: There is not enough room.
        UserFileError: The file cannot be written, or ``path`` is a folder or a device.
    """
    if path.exists() and not path.is_file():
        raise _unwritable(path, "it is no regular file")
    try:
        target = path.resolve()  # a link goes on leading there: one such as /dev/stdout is not ours to replace
        partial = target.with_name(os.fsdecode(os.fsencode(target.name)[:_LONGEST_NAME]) + ".partial")
        try:
            check_room(target, shape, kind)
            _write(partial, shape, kind, seed, on_progress or (lambda _count: None))
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle
        raise _unwritable(path, getattr(error, "strerror", None) or str(error)) from error


def _unwritable(path: Path, why: str) -> UserFileError:
    return UserFileError(str(path), [Problem("", f"cannot be written: {why}")])


def _write(path: Path, shape: Shape, kind: WeightType, seed: int, on_progress: Callable[[int], None]) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, shape.architecture)
    try:
        _describe(writer, shape, kind, seed)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        [file] = writer.fout or []
        writer.write_padding(file, file.tell())
        for tensor in shape.tensors():
            for chunk in tensor_chunks(tensor, kind, seed):
                file.write(chunk.data)
                on_progress(chunk.nbytes)
            writer.write_padding(file, tensor_bytes(tensor, kind))
    finally:
        writer.close()


def _describe(writer: GGUFWriter, shape: Shape, kind: WeightType, seed: int) -> None:
    """Everything in front of the weights."""
    import gguf

    kinds = gguf.GGUFValueType
    types = {int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING, bool: kinds.BOOL}
    file_types = {"q4_0": gguf.LlamaFileType.MOSTLY_Q4_0, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
    exact, matrix = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType[kind.upper()]
    writer.add_name(model_name(shape, kind, seed))
    writer.add_description(f"random weights in the shape of the {shape.source}; it answers nothing")
    writer.add_file_type(file_types[kind])
    for key, value in shape.metadata().items():
        name = f"{shape.architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, types[type(value)])
    add_tokenizer(writer, shape.vocabulary)
    for tensor in shape.tensors():
        stored = exact if tensor.exact else matrix
        # The type of the array decides nothing where raw_dtype is given, but uint8 would make the shape one of bytes.
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype("f4"), tensor_bytes(tensor, kind), raw_dtype=stored)
