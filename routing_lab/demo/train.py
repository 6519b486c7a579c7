"""Train the demo model and export it.

    python -m routing_lab.demo.train run OUT_DIR --seed 1 --workers 2 --threads 1
    python -m routing_lab.demo.train export OUT_DIR/checkpoint.pt demo-moe.gguf

The loss is the cross-entropy of the completion plus two terms of the routers: the usual balance
term, and a *spread* term (log k minus the entropy of the top-k weights) that keeps the router from
leaning on one expert. Without it the number of experts hardly matters: the demo model is **made**
to use all its experts. Needs the extra ``train``: ``pip install --editable '.[train]'`` in the repository.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from routing_lab.demo.gguf_export import Precision
from routing_lab.demo.settings import Job, NetworkConfig, TrainingConfig
from routing_lab.errors import RuntimeUnsupportedError

__all__ = ["main"]

PROGRAM = "python -m routing_lab.demo.train"


def _add_fields(parser: argparse._ActionsContainer, kind: type[Any]) -> None:
    for field in fields(kind):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), default=field.default, metavar="N")


def _taken(arguments: argparse.Namespace, kind: type[Any]) -> dict[str, Any]:
    return {field.name: getattr(arguments, field.name) for field in fields(kind)}


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, formatter_class=formatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="train; writes checkpoint.pt and log.jsonl",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    run.add_argument("directory", type=Path, help="where the checkpoint and the log go")
    run.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    run.add_argument("--workers", type=int, default=1, metavar="N", help="processes that share each batch")
    run.add_argument("--threads", type=int, default=2, metavar="N", help="threads of each worker")
    run.add_argument("--save-every-steps", type=int, default=500, metavar="N", help="checkpoint and evaluation")
    _add_fields(run.add_argument_group("training"), TrainingConfig)
    _add_fields(run.add_argument_group("shape"), NetworkConfig)
    write = commands.add_parser("export", help="write a checkpoint's weights as GGUF")
    write.add_argument("checkpoint", type=Path)
    write.add_argument("gguf", type=Path)
    write.add_argument("--precision", choices=get_args(Precision), default="q8_0")
    return parser


def _training() -> ModuleType:
    """The part that needs PyTorch; without it the run ends here, with one message."""
    try:
        return import_module("routing_lab.demo.training")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        needed = "PyTorch is not installed: pip install --editable '.[train]' in the repository, or pip install torch"
        sys.stderr.write(f"{PROGRAM}: error: {needed}\n")
        raise SystemExit(RuntimeUnsupportedError.exit_code) from None


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments = _parser().parse_args(argv)
    training = _training()
    if arguments.command == "export":
        training.export(arguments.checkpoint, arguments.gguf, arguments.precision)
        return
    training.train(
        Job(**_taken(arguments, Job)),
        NetworkConfig(**_taken(arguments, NetworkConfig)),
        TrainingConfig(**_taken(arguments, TrainingConfig)),
    )


if __name__ == "__main__":
    main()
