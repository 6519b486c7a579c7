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
    from routing_lab.search import Progress, StudyRecord, StudyResult, StudySettings, TrialRecord
    from routing_lab.space import SearchSpace

DEFAULT_STORAGE = Path("runs/studies.db")
SCREENING_ROUNDS = 12
_ASKED_AGAIN = ("study", "storage", "model", "probes", *options.RUNTIME)
TRIALS = 40
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
        metavar="N",
        help=f"evaluated schedules of the whole study (default: {TRIALS}, and with --hours no bound)",
    )
    hours = options.decimal(0.001, 8760, " (a year)")
    parser.add_argument(
        "--hours",
        type=hours,
        metavar="H",
        help="stop this session after so long, or at --trials where that is given too",
    )
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
            on_baseline=bar.baseline,
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
    from routing_lab.search.study import refuse_another_question

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
        stored = load_study(path, args.study)
        if stored.trials:  # a study without any takes another question
            refuse_another_question(stored, asked)


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


def _why_it_ended(result: StudyResult) -> str:
    """One sentence: what this session did, and whether there is more to do."""
    from routing_lab.search import Stop

    done, now, trials = len(result.study.evaluated), result.evaluated_now, result.study.settings["trials"]
    if result.stopped is Stop.HOURS:
        left = "more can be tried" if trials is None else f"{_counted(trials - done, 'trial')} left"
        return f"stopped by --hours after {_counted(now, 'trial')}; {left}, the same command goes on"
    if not now:
        why = "" if result.stopped is Stop.TRIALS else ", and the space holds no more"
        return f"all {_counted(done, 'trial')} were there already{why}; nothing was searched"
    if result.stopped is Stop.EXHAUSTED:
        return f"ended: every schedule of the space was evaluated ({_counted(now, 'trial')} now, {done} in all)"
    return f"ended: {_counted(now, 'trial')} now, {done} in all"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


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
        trials=TRIALS if args.trials is None and args.hours is None else args.trials,
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
    out.print()
    out.print(_why_it_ended(result))
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
        from rich.progress import BarColumn, Progress, TextColumn

        self._said_baseline, self._start = False, start
        self._out = progress_console()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[state]}"),
            console=self._out,
            disable=quiet or not self._out.is_terminal,
        )
        self._task = self._bar.add_task("baseline", total=None, count="", state="measuring the model's own counts")

    def __enter__(self) -> Self:
        self._bar.start()
        if not self._out.is_terminal:
            self._say("measuring the model's own counts (the baseline)")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def baseline(self, doing: str, done: int, total: int) -> None:
        """Show how far the baseline is."""
        self._bar.update(self._task, total=total, completed=done, count=f"{done}/{total}", state=doing)

    def update(self, progress: Progress) -> None:
        """Show where the study stands; the baseline's own failures are said once, above the bar."""
        if not self._said_baseline:
            self._said_baseline = True
            baseline = progress.baseline
            self._say(
                f"baseline: {baseline.tokens_per_s:,.1f} tokens/s, "
                f"{baseline.verdict.passed} of {baseline.verdict.total} gate probes correct"
            )
            if self._start not in {"uniform", "none"} and (calibration := baseline.calibration) and calibration.reason:
                self._say(f"no sensitivity pass, the uniform schedules instead. {calibration.describe()}")
            if baseline.failures:
                self._say(f"the baseline itself fails: {', '.join(baseline.failures)}")
        if progress.last is not None and not self._out.is_terminal:
            self._say(trial_line(progress, progress.last))
        if progress.cuts_ahead:
            cuts = progress.cuts_done + progress.cuts_ahead
            self._bar.update(
                self._task,
                description="sensitivity",
                total=cuts,
                completed=progress.cuts_done,
                count=f"{progress.cuts_done}/{cuts}",
                state="each part cut alone" + (", less where it fails" if self._start == "map" else ""),
            )
            return
        self._bar.update(
            self._task,
            description="trials",
            total=progress.total,
            completed=progress.done,
            count=_of_total(progress),
            state=_state(progress),
        )

    def _say(self, text: str) -> None:
        """One line that stays, above the bar where there is one; a file has it at once."""
        self._bar.print(shown(text), soft_wrap=True)
        self._out.file.flush()


def trial_line(progress: Progress, last: TrialRecord) -> str:
    """A finished trial in one line, for a log that nobody can look at while the bar moves."""
    if last.is_single_cut:
        ahead = progress.cuts_done + progress.cuts_ahead
        return f"cut alone {progress.cuts_done}/{ahead}: {last.key}: {_gate_words(last)}"
    left = "" if progress.seconds_left is None else f", {_duration(progress.seconds_left)} left"
    return f"trial {last.number}: {last.key}: {_trial_words(last)} ({_of_total(progress)} done{left})"


def _trial_words(trial: TrialRecord) -> str:
    from routing_lab.search import Ending

    if trial.ending is not Ending.EVALUATED:
        return f"{trial.ending.replace('_', ' ')}{f': {trial.error}' if trial.error else ''}"
    speed = trial.speed
    ratio = f"not timed ({trial.speed_skipped})" if speed is None else f"ratio {speed.ratio:.3f}"
    return f"{ratio}, {_gate_words(trial)}"


def _gate_words(trial: TrialRecord) -> str:
    verdict = trial.verdict
    if trial.gate_skipped:
        return f"gate skipped ({trial.gate_skipped})"
    if trial.verdict.failures:
        return f"failed: {len(verdict.failures)} of {verdict.run} wrong"
    return f"passed: {verdict.passed} of {verdict.total} correct" if verdict.result == "pass" else verdict.reason


def _of_total(progress: Progress) -> str:
    return str(progress.done) if progress.total is None else f"{progress.done}/{progress.total}"


def _state(progress: Progress) -> str:
    best = "none accepted yet"
    if progress.best is not None and progress.best.speed is not None:
        best = f"best ratio {progress.best.speed.ratio:.3f}"
    passing = "" if progress.pass_rate is None else f"  passing {100 * progress.pass_rate:.0f} %"
    left = "" if progress.seconds_left is None else f"  {_duration(progress.seconds_left)} left"
    return best + passing + left


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
