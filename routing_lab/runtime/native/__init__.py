"""Where the compiled expert-count override lies; ``expert_override.cpp`` in this folder is its source.

The library is no Python module: it is loaded into a process before libllama (see ``runtime.engine``) or named in
``LD_PRELOAD`` for a server.
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from routing_lab.errors import RuntimeUnsupportedError

__all__ = ["override_library"]


def override_library() -> Path:
    """Absolute path of the compiled override library.

    Raises:
        RuntimeUnsupportedError: The package was installed without it, because no C++ compiler was there or because
            the platform has no use for it.
    """
    folder = Path(__file__).resolve().parent
    for suffix in EXTENSION_SUFFIXES:
        library = folder / f"expert_override{suffix}"
        if library.is_file():
            return library
    raise RuntimeUnsupportedError(
        f"the expert override library was not built: {folder} holds no expert_override{EXTENSION_SUFFIXES[0]}; "
        "install a C++17 compiler (for instance g++) and install routing-lab again"
    )
