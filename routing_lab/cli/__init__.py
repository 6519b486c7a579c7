"""The command line: parse, call one function, render. Each command is one module with ``add`` and ``run``."""

from routing_lab.cli.app import main

__all__ = ["main"]
