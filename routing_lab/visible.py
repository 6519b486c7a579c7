"""Shows text from files and from the command line so that no character of it can act on a terminal.

Names come from strangers: a GGUF file names itself, and so do schedules, probes and files. An escape sequence in one
would colour or erase what the terminal shows, a line break would forge a line of output, a direction mark would
reorder a line. Here each such character becomes what Python would write for it.
"""

from __future__ import annotations

import re

__all__ = ["visible"]

_SAFE = re.compile(r"[\x20-\x7e]*")


def visible(text: object) -> str:
    r"""``text`` on one line, with ``\x1b``, ``\n`` or ``\u202e`` where a character has no shape of its own."""
    shown = str(text)
    if _SAFE.fullmatch(shown):
        return shown
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in shown)
