"""Where the compiled libraries lie whose sources are in this folder.

They are no Python modules: they are loaded into a process before libllama (see ``runtime.engine``), and the expert
override can be named in ``LD_PRELOAD`` for a server.
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from routing_lab.errors import RuntimeUnsupportedError

__all__ = ["override_library", "plain_kernels_library"]


def override_library() -> Path:
    """Absolute path of the compiled override library.

    Raises:
        RuntimeUnsupportedError: The package was installed without it, because no C++ compiler was there or because
            the platform has no use for it.
    """
    if library := _built("expert_override"):
        return library
    raise RuntimeUnsupportedError(
        f"the expert override library was not built: {_FOLDER} holds no expert_override{EXTENSION_SUFFIXES[0]}; "
        "install a C++17 compiler (for instance g++) and install routing-lab again"
    )


def plain_kernels_library() -> Path | None:
    """Absolute path of the library that makes batches compute as single tokens do; ``None`` where it was not built."""
    return _built("plain_kernels")


_FOLDER = Path(__file__).resolve().parent


def _built(name: str) -> Path | None:
    candidates = (_FOLDER / f"{name}{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((library for library in candidates if library.is_file()), None)
