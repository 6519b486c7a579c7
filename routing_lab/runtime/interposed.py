"""The two small libraries that stand in front of libllama and libggml, loaded into this process.

Both must be loaded before ``llama_cpp`` is imported: the dynamic linker gives a symbol to whoever is first in its
search.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from routing_lab.errors import RuntimeFailureError, RuntimeUnsupportedError

__all__ = ["Override", "PlainKernels"]

_REPORT_BYTES = 1 << 16
_ERROR_BYTES = 1 << 10


class Override:
    """The override library inside this process. It must exist before ``llama_cpp`` is imported."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        for name in ("routing_lab_bind", "routing_lab_set"):
            getattr(self._library, name).argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
        self._library.routing_lab_report.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self._library.routing_lab_report.restype = ctypes.c_size_t

    def _call(self, name: str, text: str) -> None:
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        if getattr(self._library, name)(text.encode(), error, len(error)) != 0:
            raise RuntimeUnsupportedError(error.value.decode("utf-8", "replace"))

    def bind(self, libllama: str) -> None:
        """Take the original functions from the loaded library at this path."""
        self._call("routing_lab_bind", libllama)

    def set(self, experts: str) -> None:
        """Use these counts ("0-6:6,7-32:5") for every graph built from now on; "" for the model's own."""
        self._call("routing_lab_set", experts)

    def reset_report(self) -> None:
        """Forget what graphs were built with so far."""
        self._library.routing_lab_reset_report()

    def report(self) -> list[tuple[int, int, int]]:
        """Block, count given and length of the sum (-1: not seen) of what was built since the last reset."""
        buffer = ctypes.create_string_buffer(_REPORT_BYTES)
        if self._library.routing_lab_report(buffer, len(buffer)) >= len(buffer):
            raise RuntimeFailureError(f"the override library's report exceeds {_REPORT_BYTES} bytes")
        rows = (line.split() for line in buffer.value.decode("ascii").splitlines())
        return [(int(block), int(selected), int(summed)) for block, _, selected, summed in rows]


class PlainKernels:
    """The library that lets batches compute as single tokens do; must exist before ``llama_cpp`` is imported.

    Without a library, and on builds of ggml that have no other kernels for batches, it does nothing.
    """

    def __init__(self, path: str | None) -> None:
        self._library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) if path else None

    def bind(self) -> None:
        """Find the kernels for batches in the loaded libraries, and let them work again."""
        if self._library:
            self._library.routing_lab_plain_bind()

    @contextlib.contextmanager
    def only(self) -> Iterator[None]:
        """Keep the kernels for batches out of what is computed inside."""
        if not self._library:
            yield
            return
        self._library.routing_lab_plain_set(1)
        try:
            yield
        finally:
            self._library.routing_lab_plain_set(0)
