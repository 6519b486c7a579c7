"""The model's own process: ``python -m routing_lab.runtime.llama_child FD TIE`` answers the requests of ``channel``.

libllama ends its process on a failed assertion, so the model lives here and the lab survives it.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from routing_lab.errors import RoutingLabError
from routing_lab.runtime import channel
from routing_lab.runtime.engine import Engine, LoadSpec

_PARENT_CHECK_S = 1.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def watch(connection: Connection, requests: queue.SimpleQueue[channel.Message]) -> None:
    """Hand requests on, and end the process at once when the lab is gone, whatever libllama is doing.

    The end of the line tells so, and the change of the parent's id does where a forked process still holds the line.
    """
    parent = os.getppid()
    try:
        while os.getppid() == parent:
            if connection.poll(_PARENT_CHECK_S):
                requests.put(channel.receive(connection))
    except (EOFError, OSError):
        pass  # the lab closed the line
    os._exit(0)


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, also while this process is stopped.

    Only for a process that the lab's first thread started, whose end is the lab's own. A process that another thread
    started and that is stopped (SIGSTOP) when the lab is killed stays until somebody lets it go on.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Server:
    """Turns requests into calls of the engine."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The loaded engine; ``load`` comes first."""
        assert self._engine is not None, "the first request is load"  # noqa: S101 (a bug of the lab)
        return self._engine

    def load(self, **spec: Any) -> channel.Message:  # noqa: ANN401
        """Load the model and describe the library."""
        self._engine = Engine(LoadSpec(**spec))
        return asdict(self._engine.loaded())

    def switch(self, **counts: Any) -> channel.Message:  # noqa: ANN401
        """Use other counts."""
        return asdict(self.engine.switch(**counts))

    def generate(self, **request: Any) -> channel.Message:  # noqa: ANN401
        """Complete a prompt."""
        return self.engine.generate(**request)

    def verify(self, **request: Any) -> channel.Message:  # noqa: ANN401
        """Check drafts."""
        return {"verified": self.engine.verify(**request)}

    def decode_timing(self, **request: int) -> channel.Message:
        """Time single-token decodes."""
        return self.engine.decode_timing(**request)

    def render_chat(self, **request: Any) -> channel.Message:  # noqa: ANN401
        """Apply the chat template."""
        return {"text": self.engine.render_chat(**request)}

    def logits(self, **request: str) -> channel.Message:
        """Logits after a prompt."""
        return {"float32": self.engine.logits(**request).hex()}

    def answer(self, request: channel.Message) -> channel.Message:
        """The reply to one request; a bug's exception passes through and ends the process with its traceback."""
        handler: Callable[..., channel.Message] = getattr(self, request.pop("do"))
        try:
            return {"ok": handler(**request)}
        except RoutingLabError as error:
            kinds = (kind for kind, branch in channel.ERROR_KINDS.items() if isinstance(error, branch))
            return {"error": {"kind": next(kinds, "failure"), "message": str(error)}}


def main(descriptor: int, tie: str) -> None:
    """Serve the socket ``descriptor`` until its other end closes; ``tie`` is ``parent`` for ``end_with_parent``."""
    if tie == "parent":
        end_with_parent()
    connection = Connection(descriptor)
    requests: queue.SimpleQueue[channel.Message] = queue.SimpleQueue()
    threading.Thread(target=watch, args=(connection, requests), daemon=True).start()
    server = Server()
    while True:
        channel.send(connection, server.answer(requests.get()))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
