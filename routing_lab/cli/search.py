"""``routing-lab search``: run a study, or go on with one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from routing_lab.cli import options
from routing_lab.cli.output import console, print_json, progress_console, say_error, shown, strip_width
from routing_lab.errors import NothingAcceptedError, Problem, RoutingLabError, UserFileError

if TYPE_CHECKING:
    from routing_lab.model import ModelFacts
    from routing_lab.probes import ProbeSet
    from routing_lab.search import Progress, StudyRecord, StudyResult, StudySettings
    from routing_lab.space import SearchSpace

DEFAULT_STORAGE = Path("runs/studies.db")
SCREENING_ROUNDS = 6
_ASKED_AGAIN = ("study", "storage", "model", "probes", *options.RUNTIME)
MOST_TRIALS = 1_000_000


def add(commands: options.Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = options.command(
        commands,
        "search",
        run,
        help="search for schedules that decode faster and still pass every gate probe",
        description="Run a study: propose a schedule, measure its speed, put it through the gate, go on.\n"
        "Everything finished is saved; the same command again goes on where it stopped, after Ctrl-C too.",
        example="routing-lab search --trials 40 --study demo",
    )
    options.add_model(parser)
    options.add_probes(parser)
    add_study(parser, new=True)
    parser.add_argument("--space", type=Path, metavar="YAML", help="search space (default: made for the model)")
    parser.add_argument(
        "--trials",
        type=options.whole(1, MOST_TRIALS),
        default=40,
        metavar="N",
        help="evaluated schedules of the whole study (default: %(default)s)",
    )
    hours = options.decimal(0.001, 8760, " (a year)")
    parser.add_argument("--hours", type=hours, metavar="H", help="stop this session after so long")
    parser.add_argument(
        "--sampler",
        choices=("schedule", "tpe", "gp", "nsga2", "random"),
        default="schedule",
        help="schedule: made for this search; the others are Optuna's (default: %(default)s)",
    )
    parser.add_argument(
        "--start",
        choices=("auto", "sensitivity", "map", "uniform", "none"),
        default="auto",
        help="before the sampler proposes: sensitivity: each block or band cut alone as far as the space goes, not "
        "timed and not counted by --trials; map: the same with whole gates and gentler cuts; uniform: the uniform "
        "schedules; none; auto: sensitivity where it is possible, else uniform (default: %(default)s)",
    )
    parser.add_argument("--seed", type=options.non_negative, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--policy",
        choices=("all_correct", "no_worse_than_baseline"),
        default="all_correct",
        help="what the gate demands of every probe (default: %(default)s)",
    )
    options.add_measure(parser, rounds=SCREENING_ROUNDS, precision=0.015)
    options.add_plain(parser)
    options.add_runtime(parser)


def add_study(parser: argparse.ArgumentParser, *, new: bool = False) -> None:
    """``--study`` and ``--storage``: which study; one that is there need not be named where it is the only one."""
    name, absent = ("default", "%(default)s") if new else (None, "the only one of the storage")
    parser.add_argument("--study", default=name, metavar="NAME", help=f"name of the study (default: {absent})")
    parser.add_argument(
        "--storage", default=DEFAULT_STORAGE, metavar="FILE", help="SQLite file of studies (default: %(default)s)"
    )


def study_storage(args: argparse.Namespace) -> Path:
    """The file of ``--storage``.

    Raises:
        UsageError: It is no file name, or ``--study`` no name of a study.
        UserFileError: It is there and no file.
    """
    from routing_lab.search.storage import check_study_name, storage_path

    if args.study is not None:
        check_study_name(args.study)
    path = storage_path(args.storage)
    if path.exists() and not path.is_file():
        what = "is a folder" if path.is_dir() else "is no regular file"
        raise UserFileError(str(path), [Problem("", what, "name a file, for instance runs/studies.db")])
    return path


def run(args: argparse.Namespace) -> int:
    """Run the study and print its frontier; exit code 5 when nothing passed."""
    from routing_lab.search import run_study

    settings = _settings(args)
    probes = options.probe_set(args)
    options.require_splits(probes, "gate")
    space = _space(args)
    _check_study(args, probes, space)
    with options.open_runtime(args) as runtime, _Bar(quiet=args.json, start=args.start) as bar, _leaving_no_lock(args):
        result = run_study(
            runtime,
            probes,
            space,
            study=args.study,
            storage=args.storage,
            settings=settings,
            on_progress=bar.update,
        )
        facts = runtime.facts
    _print_result(args, result, facts)
    if not result.candidates:
        return say_error(NothingAcceptedError(_nothing_passed(args, result)))
    return 0


def _check_study(args: argparse.Namespace, probes: ProbeSet, space: SearchSpace) -> None:
    """Say before the model is loaded what needs no model: the study is run elsewhere, or asks another question.

    Raises as ``run_study``, which looks again: it knows the library and the model's digest too.
    """
    from routing_lab.schedule import Schedule
    from routing_lab.search.dimensions import Dimensions
    from routing_lab.search.sensitivity import SingleCuts
    from routing_lab.search.storage import load_study, study_lock, study_names
    from routing_lab.search.study import _refuse_another_question

    facts = options.read_facts(args)
    space.check(facts)
    SingleCuts.of_start(Dimensions(space, facts), _settings(args))
    path = study_storage(args)
    with study_lock(path, args.study):
        pass
    if path.exists() and path.stat().st_size > 0 and args.study in study_names(path):
        asked = {
            "baseline": Schedule.baseline(facts).key(facts),
            "probes": f"{probes.name} ({probes.digest})",
            "search space": space.to_yaml(),
            "policy": args.policy,
            "placement": options.runtime_options(args).placement.describe(),
        }
        _refuse_another_question(load_study(path, args.study), asked)


@contextmanager
def _leaving_no_lock(args: argparse.Namespace) -> Iterator[None]:
    """Remove the study's lock file after an error or an interrupt too: whoever takes the lock last removes its file."""
    from routing_lab.search.storage import study_lock

    try:
        yield
    except BaseException:
        with suppress(RoutingLabError), study_lock(study_storage(args), args.study):
            pass
        raise


def _nothing_passed(args: argparse.Namespace, result: StudyResult) -> str:
    evaluated = len(result.study.evaluated)
    if not evaluated:
        return f"study {args.study} ended before a schedule was evaluated; give it more --hours or --trials"
    return (
        f"none of the {evaluated} schedules of study {args.study} passed the gate; "
        "search longer, or widen the space towards the model's own counts"
    )


def _settings(args: argparse.Namespace) -> StudySettings:
    from routing_lab.gate import Policy, Rule
    from routing_lab.search import StudySettings

    return StudySettings(
        trials=args.trials,
        hours=args.hours,
        seed=args.seed,
        sampler=args.sampler,
        measure=options.measure_settings(args),
        policy=Policy(Rule(args.policy)),
        verify=not args.plain,
        start=args.start,
    )


def _space(args: argparse.Namespace) -> SearchSpace:
    from routing_lab.space import SearchSpace

    return SearchSpace.default(options.read_facts(args)) if args.space is None else SearchSpace.load(args.space)


def _print_result(args: argparse.Namespace, result: StudyResult, facts: ModelFacts) -> None:
    from routing_lab.report import schedule_strip, screening_table, sensitivity_table

    if args.json:
        print_json(study_fields(result.study) | {"stopped": result.stopped})
        return
    out = console()
    out.print(screening_table(result.study))
    if result.study.single_cuts:
        out.print()
        out.print(sensitivity_table(result.study))
    if result.candidates:
        best = result.candidates[0]
        out.print(f"\nfastest accepted so far (screening): {best.key}")
        out.print(schedule_strip(best.schedule, facts, width=strip_width(out)))
        out.print()
        out.print(shown(f"next: {options.command_line(args, 'validate', *_ASKED_AGAIN)}"), soft_wrap=True)


def study_fields(study: StudyRecord) -> dict[str, object]:
    """A study as JSON: every trial in its stored form, the accepted ones, fastest first, and the sensitivity pass."""
    from routing_lab.report import sensitivity_fields
    from routing_lab.search import candidates

    return {
        "study": study.name,
        "storage": study.storage,
        "stage": "screening",
        "identity": study.identity,
        "baseline": None if study.baseline is None else study.baseline.to_dict(),
        "trials": [{"number": trial.number, **trial.to_dict()} for trial in study.trials],
        "accepted": [trial.number for trial in candidates(study)],
        "sensitivity": sensitivity_fields(study),
    }


class _Bar:
    """The progress bar of a study: trials done, best ratio so far, pass rate, time left."""

    def __init__(self, *, quiet: bool, start: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._said_baseline, self._start = False, start
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            console=progress_console(),
            disable=quiet,
        )
        self._task = self._bar.add_task("baseline", total=None, state="measuring the model's own counts")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, progress: Progress) -> None:
        """Show where the study stands; the baseline's own failures are said once, above the bar."""
        if not self._said_baseline:
            self._said_baseline = True
            baseline = progress.baseline
            self._bar.print(
                f"baseline: {baseline.tokens_per_s:,.1f} tokens/s, "
                f"{baseline.verdict.passed} of {baseline.verdict.total} gate probes correct"
            )
            if self._start not in {"uniform", "none"} and (calibration := baseline.calibration) and calibration.reason:
                self._bar.print(shown(f"no sensitivity pass, the uniform schedules instead: {calibration.describe()}"))
            if baseline.failures:
                self._bar.print(shown(f"the baseline itself fails: {', '.join(baseline.failures)}"))
        if progress.cuts_ahead:
            cuts = progress.cuts_done + progress.cuts_ahead
            self._bar.update(
                self._task,
                description="sensitivity",
                total=cuts,
                completed=progress.cuts_done,
                state="each part cut alone" + (", less where it fails" if self._start == "map" else ""),
            )
            return
        self._bar.update(
            self._task,
            description="trials",
            total=progress.total,
            completed=progress.done,
            state=_state(progress),
        )


def _state(progress: Progress) -> str:
    best = "none accepted yet"
    if progress.best is not None and progress.best.speed is not None:
        best = f"best ratio {progress.best.speed.ratio:.3f}"
    passing = "" if progress.pass_rate is None else f"  passing {progress.pass_rate:.0%}"
    left = "" if progress.seconds_left is None else f"  {_duration(progress.seconds_left)} left"
    return best + passing + left


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
