"""Figures that a command was asked for: what must be known before the work, and their bytes after it."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING

from routing_lab.errors import RuntimeUnsupportedError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_figure", "drawn", "require_libraries"]


def check_figure(path: Path | None, option: str = "--figure") -> None:
    """Raise ``UsageError`` where the name of a figure says no format that is written."""
    from routing_lab.report import FIGURE_FORMATS

    if path is not None and _format(path) not in FIGURE_FORMATS:
        names = ", ".join(f".{name}" for name in FIGURE_FORMATS)
        raise UsageError(f"{option} {path}: to say the format, the name must end in {names}")


def require_libraries(**wanted: object) -> None:
    """Raise ``RuntimeUnsupportedError`` with every library that is wanted (its value is true) and not installed."""
    missing = [name for name, needed in wanted.items() if needed and importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeUnsupportedError(
            f"{' and '.join(missing)} not installed, and frames and figures need it: "
            "pip install 'routing-lab[notebooks]'"
        )


def drawn(figure: Figure, path: Path) -> bytes:
    """The figure in the format that the name of its file says."""
    content = io.BytesIO()
    figure.savefig(content, format=_format(path), dpi=160, bbox_inches="tight")
    return content.getvalue()


def _format(path: Path) -> str:
    return path.suffix.lower().removeprefix(".")
