"""Random weights as the bytes of a file, chunk by chunk: quantised blocks are drawn, never computed from floats.

Each tensor has a stream of random bits of its own, seeded by the file's seed and the tensor's name. All bits of the
quants are fresh ones (no pool is repeated), so that experts differ, nothing compresses and every page is real.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from routing_lab.synth.shapes import TensorPlan

__all__ = ["WEIGHT_TYPES", "WeightType", "tensor_bytes", "tensor_chunks"]

WeightType = Literal["q4_0", "q8_0"]
WEIGHT_TYPES: Final[tuple[WeightType, ...]] = get_args(WeightType)

Bytes: TypeAlias = npt.NDArray[np.uint8]

_BLOCK: Final = 32  # weights in a block of either type
_BLOCK_BYTES: Final = {"q4_0": 18, "q8_0": 34}  # a scale in half precision, then the quants
# The quants are -8 to 7, and -127 to 127 (ggml's own quantiser never writes -128). An even spread from -reach to reach
# has their deviation.
_REACH: Final = {"q4_0": 8.03, "q8_0": 127.5}
_CHUNK: Final = 1 << 15  # blocks or floats at a time: about a megabyte, which stays in a core's caches

_SIGN, _LAST_BITS = 0x8000, 0x001F


def tensor_bytes(tensor: TensorPlan, kind: WeightType) -> int:
    """Bytes of the tensor in the file, without padding."""
    return 4 * tensor.elements if tensor.exact else tensor.elements // _BLOCK * _BLOCK_BYTES[kind]


def tensor_chunks(tensor: TensorPlan, kind: WeightType, seed: int) -> Iterator[Bytes]:
    """The tensor's bytes, in order."""
    # Bit generators and seed sequences keep their streams from release to release; numpy's distributions need not.
    source = np.random.PCG64DXSM(np.random.SeedSequence([seed, zlib.crc32(tensor.name.encode())]))
    units = tensor.elements if tensor.exact else tensor.elements // _BLOCK
    for start in range(0, units, _CHUNK):
        count = min(_CHUNK, units - start)
        yield _floats(source, tensor, count) if tensor.exact else _blocks(source, tensor, kind, count)


def _random_bytes(source: np.random.PCG64DXSM, count: int) -> Bytes:
    words: npt.NDArray[np.uint64] = source.random_raw(-(-count // 8))
    return words.astype("<u8", copy=False).view(np.uint8)[:count]


def _floats(source: np.random.PCG64DXSM, tensor: TensorPlan, count: int) -> Bytes:
    draws = _random_bytes(source, 4 * count).view("<u4") >> 8  # the 24 bits that a float32 holds
    values = tensor.low + (tensor.high - tensor.low) * (draws / (1 << 24))
    return values.astype("<f4").view(np.uint8)


def _blocks(source: np.random.PCG64DXSM, tensor: TensorPlan, kind: WeightType, count: int) -> Bytes:
    """Blocks whose scale has a random sign and random last bits (worth 3 % at most), so that values centre on zero.

    The range of four-bit quants leans to the negative side. With a scale of one sign the mean of the weights would not
    be zero, and block by block the activations would run off in one direction until all tokens look alike.
    """
    drawn = _random_bytes(source, count * _BLOCK_BYTES[kind])
    scales = drawn.view("<u2").reshape(count, -1)[:, 0]
    scales &= _SIGN | _LAST_BITS
    scales |= _scale_bits(tensor.high / _REACH[kind])
    if kind == "q8_0":
        quants = drawn.view(np.int8).reshape(count, -1)[:, 2:]
        np.maximum(quants, -127, out=quants)
    return drawn


def _scale_bits(scale: float) -> int:
    """Bits of the half-precision number next below ``scale`` whose last bits are free."""
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"a scale must be finite and positive, got {scale}")
    return int(np.float16(scale).view(np.uint16)) & ~_LAST_BITS
