"""libllama through llama-cpp-python's low-level functions: importing it, its log, and the devices it can use.

Importing this module loads nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from routing_lab.errors import RuntimeFailureError, RuntimeUnsupportedError

__all__ = [
    "LOG_INFO",
    "LOG_WARN",
    "Buffer",
    "Device",
    "Log",
    "add_rpc_server",
    "devices",
    "ggml_function",
    "import_api",
]

LOG_INFO, LOG_WARN = 2, 3  # enum ggml_log_level
_LOG_CONTINUED = 5

_RPC_TIMEOUT_S = 10.0
_RPC_PATIENCE_S = 2.0

# Who says it, then for example: CPU_Mapped model buffer size =    12.34 MiB
_BUFFER = re.compile(rb": +(\S+) +(model|KV|RS|compute|output) buffer size = +([0-9.]+) MiB")
_OF_MODEL = "model"
_IN_PARTS = {_OF_MODEL, "KV"}  # said once per file of the model, and once per kind of attention


@dataclass(frozen=True, slots=True)
class Device:
    """A device as llama.cpp lists it; memory in bytes."""

    name: str
    description: str
    kind: Literal["cpu", "gpu", "integrated gpu", "accelerator", "other"]
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that libllama says it took: where (its name of the device), for what, and how many bytes.

    ``use`` is ``model``, ``KV``, ``RS`` (recurrent states), ``compute`` or ``output``. libllama prints hundredths of a
    MiB, so a size is right to 5 KiB. Weights that are mapped from the file count in full, read or not.
    """

    device: str
    use: str
    size_bytes: int

    @property
    def on_device(self) -> bool:
        """Whether this is memory of a device; buffers for transfers to one (``CUDA_Host``) are the host's."""
        return not self.device.startswith("CPU") and not self.device.endswith("_Host")


def import_api() -> Any:  # noqa: ANN401 (the module llama_cpp.llama_cpp has no type)
    """llama-cpp-python's low-level module, its back ends loaded. Raises ``RuntimeUnsupportedError`` without one."""
    try:
        api = importlib.import_module("llama_cpp.llama_cpp")
    except ImportError as error:
        raise RuntimeUnsupportedError(f"llama-cpp-python cannot be imported: {error}") from error
    except (AttributeError, OSError, RuntimeError) as error:
        # llama_cpp looks every function up while it is imported, and a libllama of another time lacks some.
        raise RuntimeUnsupportedError(f"llama-cpp-python cannot use this libllama: {error}") from error
    api.llama_backend_init()
    if api._lib.ggml_backend_dev_count() == 0:  # noqa: SLF001 (backends as plug-ins, not loaded yet)
        api._lib.ggml_backend_load_all()  # noqa: SLF001
    return api


class Log:
    """Sends libllama's messages from a level on to standard error.

    llama-cpp-python has a callback of its own, whose levels are one off those of this ``ggml.h``.
    """

    def __init__(self, api: Any) -> None:  # noqa: ANN401
        self.lowest = LOG_WARN
        self._shown = True
        self._held: list[bytes] | None = None
        self._buffers: dict[tuple[str, str], int] = {}
        self._callback = api.llama_log_callback(self._write)  # must live as long as libllama may call it
        api.llama_log_set(self._callback, None)

    def _write(self, level: int, text: bytes, _data: int | None) -> None:
        if level != _LOG_CONTINUED:
            self._shown = level >= self.lowest
        if self._shown and self._held is not None:
            self._held.append(text)
        elif self._shown:
            os.write(2, text)
        if said := _BUFFER.search(text):
            device, use, mebibytes = (part.decode("utf-8", "replace") for part in said.groups())
            key = device, use
            before = self._buffers.get(key, 0) if use in _IN_PARTS else 0
            self._buffers[key] = before + round(float(mebibytes) * 2**20)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep messages back, and let them go only where an error ends what is done inside."""
        self._held = []
        try:
            yield
        except RuntimeFailureError:
            os.write(2, b"".join(self._held))
            raise
        finally:
            self._held = None

    def forget_buffers(self) -> None:
        """Forget those that belong to a context; one for weights is forgotten when the weights are read again."""
        self._buffers = {key: size for key, size in self._buffers.items() if key[1] == _OF_MODEL}

    def forget_all_buffers(self) -> None:
        """Forget what was said about memory so far."""
        self._buffers = {}

    def buffers(self) -> list[Buffer]:
        """What the model and its latest context take."""
        return [Buffer(device, use, size) for (device, use), size in sorted(self._buffers.items())]


def ggml_function(api: Any, name: str, restype: type | None) -> Any:  # noqa: ANN401
    """A function of libggml that takes one pointer."""
    # A symbol is searched in a library and everything it depends on, so libllama's handle reaches libggml too.
    function = getattr(api._lib, name)  # noqa: SLF001 (the only handle of the library that is really in use)
    function.argtypes = [ctypes.c_void_p]
    function.restype = restype
    return function


def devices(api: Any) -> list[Device]:  # noqa: ANN401
    """All devices that libllama can use, in its order."""
    kinds: tuple[Literal["cpu", "gpu", "integrated gpu", "accelerator"], ...]
    kinds = ("cpu", "gpu", "integrated gpu", "accelerator")  # enum ggml_backend_dev_type
    name, description, kind, device_at = (
        ggml_function(api, f"ggml_backend_dev_{what}", restype)
        for what, restype in (
            ("name", ctypes.c_char_p),
            ("description", ctypes.c_char_p),
            ("type", ctypes.c_int),
            ("get", ctypes.c_void_p),
        )
    )
    device_at.argtypes = [ctypes.c_size_t]
    memory = ggml_function(api, "ggml_backend_dev_memory", None)
    memory.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)]
    found = []
    for index in range(api._lib.ggml_backend_dev_count()):  # noqa: SLF001
        device = device_at(index)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        memory(device, ctypes.byref(free), ctypes.byref(total))
        number = kind(device)
        found.append(
            Device(
                name=name(device).decode("utf-8", "replace"),
                description=description(device).decode("utf-8", "replace"),
                kind=kinds[number] if number < len(kinds) else "other",
                free_bytes=free.value,
                total_bytes=total.value,
            )
        )
    return found


def add_rpc_server(api: Any, endpoint: str) -> None:  # noqa: ANN401
    """Make the devices of an RPC server known, so that the next model that is loaded can use them.

    libllama ends the process where nothing answers there, so that is tried first.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_RPC_TIMEOUT_S).close()
    except OSError as error:
        raise RuntimeUnsupportedError(f"no RPC server answers at {endpoint}: {error.strerror or error}") from None
    library = api._lib  # noqa: SLF001
    by_name, address, register = (
        getattr(library, f"ggml_backend_{name}") for name in ("reg_by_name", "reg_get_proc_address", "register")
    )
    by_name.argtypes, by_name.restype = [ctypes.c_char_p], ctypes.c_void_p
    address.argtypes, address.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_void_p
    backend = by_name(b"RPC")
    add = address(backend, b"ggml_backend_rpc_add_server") if backend else None
    if not add:
        raise RuntimeUnsupportedError(
            "this libllama has no RPC back end: build llama.cpp with -DGGML_RPC=ON and name its folder with --library"
        )
    # A server that is busy accepts and stays silent, for as long as the other client lasts.
    waiting = f"still waiting for the RPC server at {endpoint}; it serves one client at a time\n".encode()
    patience = threading.Timer(_RPC_PATIENCE_S, os.write, (2, waiting))
    patience.daemon = True
    patience.start()
    offered = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(add)(endpoint.encode())
    patience.cancel()
    if not offered:
        raise RuntimeUnsupportedError(f"the RPC server at {endpoint} offers no device (one of another version?)")
    register.argtypes, register.restype = [ctypes.c_void_p], None
    register(offered)
