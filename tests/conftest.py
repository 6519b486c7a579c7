"""What the tests of several folders share; its presence also puts this folder on the path, for the modules beside it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from routing_lab.runtime.server_binary import BUILT_BY_MAKE

# Whoever runs the tests in the background of a script has Ctrl-C ignored in them and in every process that they start,
# and the tests of Ctrl-C would wait for what cannot come.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine the time of one example says nothing about the code.
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")


@pytest.fixture
def nonfile(tmp_path: Path) -> Callable[..., Path]:
    """Makes what a reader of files must not touch: reading it would wait for ever, or never end."""

    def make(kind: str, name: str = "first") -> Path:
        path = tmp_path / f"{name}-{kind}"
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as unix:
                unix.bind(os.path.relpath(path))  # a name of a socket is short
        else:
            path.symlink_to("/dev/zero")
        return path

    return make


@pytest.fixture(scope="session")
def llama_server() -> Path:
    """The llama-server that make built; a test that needs it must not pass for want of it where all is to be tested."""
    if not BUILT_BY_MAKE.is_file():
        missing = f"there is no {BUILT_BY_MAKE}: make llama-server builds it"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    return BUILT_BY_MAKE
