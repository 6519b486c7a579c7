"""``python -m routing_lab`` and ``routing-lab``: the command line as a process."""

from routing_lab.interrupts import EXIT_CODE, end_at_once


def run() -> int:
    """Run the command line and return its exit code."""
    end_at_once()  # before the imports, which are most of the time that a short command takes
    from routing_lab.cli import main

    try:
        return main()
    except KeyboardInterrupt:  # a second one, while the first was being answered
        return EXIT_CODE


if __name__ == "__main__":
    raise SystemExit(run())
