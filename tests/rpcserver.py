"""A second device on any machine: llama.cpp's RPC server on loopback, built with the server (``make llama-server``)."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
START_S = 30.0


def llama_bin() -> Path:
    """The folder with llama.cpp's programs and its libllama; skips the test where there is none, fails it in CI."""
    named = os.environ.get("ROUTING_LAB_LLAMA_BIN")
    folder = Path(named) if named else ROOT / ".cache" / "llama.cpp-0.3.36" / "bin"
    if (folder / "ggml-rpc-server").is_file():
        return folder
    missing = f"there is no ggml-rpc-server in {folder}: make llama-server builds it, ROUTING_LAB_LLAMA_BIN names it"
    if os.environ.get("CI") == "true":
        pytest.fail(missing)
    pytest.skip(missing)


@dataclass(frozen=True)
class RpcServer:
    process: subprocess.Popen[bytes]
    endpoint: str
    library_dir: Path


@contextlib.contextmanager
def rpc_server(folder: Path) -> Iterator[RpcServer]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(folder / "ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            assert process.poll() is None, "ggml-rpc-server ended"
            assert time.monotonic() < deadline, "ggml-rpc-server does not listen"
            time.sleep(0.05)
        libraries = (folder, folder.parent / "lib")
        library_dir = next((place for place in libraries if (place / "libllama.so").exists()), folder)
        yield RpcServer(process, f"127.0.0.1:{port}", library_dir)
    finally:
        process.kill()
        process.wait()
