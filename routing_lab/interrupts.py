"""What Ctrl-C, SIGTERM and a lost terminal do to the command line: end it at once, or unwind where something is saved.

Python's own answer to Ctrl-C is an exception in whatever line happens to run, also in the middle of an import, where
nobody can catch it. Here that happens only while there is work to save (``unwinding``).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["EXIT_CODE", "end_at_once", "unwinding"]

EXIT_CODE = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_at_once() -> None:
    """From here on these signals end the process with exit code 130, without a word.

    What was started with one of them ignored (nohup, a job in the background of a script) goes on ignoring it.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


@contextmanager
def unwinding() -> Iterator[None]:
    """Within this block they raise ``KeyboardInterrupt``. Changes nothing in a process that has other handlers."""
    ours = [number for number in _SIGNALS if signal.getsignal(number) is _end]
    try:
        for number in ours:
            signal.signal(number, _raise)
        yield
    finally:
        for number in ours:
            signal.signal(number, _end)


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(EXIT_CODE)


def _raise(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
