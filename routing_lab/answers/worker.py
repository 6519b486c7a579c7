"""The process that compares expressions: ``main`` is all that runs in it.

The process that the supervisor starts imports sympy, warms it up, and then only forks: the child of the moment reads
requests from standard input and answers on standard output. When a comparison breaks a limit the kernel kills that
child, and the next one is forked in milliseconds, where a fresh interpreter would need a second to import sympy.

Protocol: JSON lines. A child first writes ``{"ready": pid}``; a request is ``{"id": n, "expected": tree, "given":
tree}`` with a tree as ``[kind, value, [trees]]``; its reply is ``{"id": n, "equal": "yes"|"no"|"undecided"}``. A reply
is shorter than ``PIPE_BUF`` and therefore written whole, so a killed child never leaves half a line behind.

Limits on a child, all enforced by the kernel: address space; processor time of a request (``ITIMER_PROF``) and its
wall time (``ITIMER_REAL``), both with the default action of their signal, death, which also works inside one long
C computation; no files written, no core dump. It dies with its parent (``PR_SET_PDEATHSIG``), and its parent ends when
the supervisor's end of the pipe closes, however the supervisor died.

Nothing is caught here: a comparison that makes sympy raise kills its child, which reads as "undecided" like a limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any, Final

from routing_lab.answers.limits import WORKER_CPU_S, WORKER_MEMORY_BYTES, WORKER_WALL_S
from routing_lab.answers.syntax import Node, parse

__all__ = ["main", "read_tree", "write_tree"]

_PR_SET_PDEATHSIG: Final = 1
_WARM_UP: Final = (
    ("x^2+2x+1", "(x+1)^2"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    (r"\sin^2 x+\cos^2 x", "1"),
    (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}"),
    (r"\ln(x^2)", r"2\ln x"),
    (r"\sqrt[3]{x^2}", "x^{2/3}"),
    ("2x+4y=3", "y=3/4-x/2"),
    (r"e^{i\pi}", "-1"),
)
"""Comparisons that make sympy import and cache what most others need."""


def main(supervisor: int) -> None:
    """Fork children that serve, one after another, until one of them sees the end of its input.

    Args:
        supervisor: The process id of the parent. A child that dies over a comparison just when the supervisor has gone
            does not see that end, so the parent is asked for too.
    """
    from routing_lab.answers.symbolic import compare

    for expected, given in _WARM_UP:
        trees = parse(expected), parse(given)
        if isinstance(trees[0], Node) and isinstance(trees[1], Node):
            compare(trees[0], trees[1])
    # Only the supervisor ends this process; a Ctrl-C in its terminal is its own business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while os.getppid() == supervisor:
        child = os.fork()
        if child == 0:
            # Nobody reads any more: the supervisor has closed its ends while the last child was at work.
            with contextlib.suppress(BrokenPipeError):
                _serve()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return


def _serve() -> None:
    from routing_lab.answers.symbolic import compare

    _limit_this_process()
    _reply({"ready": os.getpid()})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, WORKER_CPU_S)
        signal.setitimer(signal.ITIMER_REAL, WORKER_WALL_S)
        equal = compare(read_tree(request["expected"]), read_tree(request["given"]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply({"id": request["id"], "equal": equal})


def _limit_this_process() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY_BYTES, WORKER_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _reply(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def write_tree(node: Node) -> list[Any]:
    """Turn a tree into JSON values."""
    return [node.kind, node.value, [write_tree(part) for part in node.parts]]


def read_tree(values: list[Any]) -> Node:
    """Turn what ``write_tree`` made back into a tree."""
    kind, value, parts = values
    return Node(kind, value, tuple(read_tree(part) for part in parts))
