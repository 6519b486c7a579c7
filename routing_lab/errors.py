"""Every exception routing_lab raises on purpose, and the exit code each one ends a command with.

::

    RoutingLabError                    1  a bug, when nothing more specific fits
    ├── UsageError                     2  the command line (or a call) asks for something that makes no sense
    ├── UserFileError                  3  a file of the user's is bad; carries every problem found in it
    ├── RuntimeUnsupportedError        4  libllama is missing, or cannot do what was asked
    │   └── AttestationError           4  the running graph uses other counts than the schedule
    ├── RuntimeFailureError            4  the model's process died, hung or refused; it can be restarted
    ├── NothingAcceptedError           5  the work is done and no schedule passed
    └── InterruptedStudyError        130  the user pressed Ctrl-C; the state is saved

Expected failure of a *model* (a wrong answer, no answer) is data, not an exception: see ``gate``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

__all__ = [
    "AttestationError",
    "InterruptedStudyError",
    "NothingAcceptedError",
    "Problem",
    "RoutingLabError",
    "RuntimeFailureError",
    "RuntimeUnsupportedError",
    "UsageError",
    "UserFileError",
]


class RoutingLabError(Exception):
    """Root of the tree: catch this to catch everything the package raises on purpose."""

    exit_code: ClassVar[int] = 1


class UsageError(RoutingLabError):
    """The call itself is wrong: an option out of range, two options that exclude each other."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a file: where, what, and the way out.

    ``where`` is a path inside the file (``experts_used.33-40``, ``items[3].answer``) or ``line 7``.
    """

    where: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head} ({self.remedy})" if self.remedy else head


class UserFileError(RoutingLabError):
    """A file the user gave is unreadable or breaks its format; ``problems`` lists all of it at once."""

    exit_code = 3

    def __init__(self, file: str, problems: Iterable[Problem]) -> None:
        self.file = file
        self.problems = tuple(problems)
        lines = [str(problem) for problem in self.problems]
        head = f"{file}: {lines[0]}" if len(lines) == 1 else f"{file}: {len(lines)} problems"
        super().__init__(head if len(lines) == 1 else "\n  ".join([head, *lines]))


class RuntimeUnsupportedError(RoutingLabError):
    """libllama is missing or this build of it cannot do what was asked; the message names both sides."""

    exit_code = 4


class AttestationError(RuntimeUnsupportedError):
    """A block of the running graph selects another number of experts than the schedule asks for."""

    def __init__(self, block: int, wanted: int, got: int | None, detail: str = "") -> None:
        self.block = block
        self.wanted = wanted
        self.got = got
        seen = "no routed experts at all" if got is None else str(got)
        tail = f"; {detail}" if detail else ""
        super().__init__(
            f"attestation failed: block {block} should consult {wanted} experts, the graph consults {seen}{tail}"
        )


class RuntimeFailureError(RoutingLabError):
    """The model's process died, hung or refused a request; ``log_tail`` holds its last words."""

    exit_code = 4

    def __init__(self, message: str, log_tail: str = "") -> None:
        self.log_tail = log_tail
        super().__init__(message)


class NothingAcceptedError(RoutingLabError):
    """The search or the acceptance run finished and no schedule passed."""

    exit_code = 5


class InterruptedStudyError(RoutingLabError):
    """The user interrupted a study; everything finished is saved and the message says how to resume."""

    exit_code = 130
