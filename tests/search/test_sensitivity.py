"""The sensitivity pass: what it asks and in which order, what it leaves to the search, and what people see of it."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakelab import NEEDS, make_facts, make_probes, make_runtime, make_space
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from routing_lab import report
from routing_lab.cli.app import main
from routing_lab.demo import probes_path
from routing_lab.errors import InterruptedStudyError, UsageError
from routing_lab.gate import Policy, Result, Rule
from routing_lab.measure import MeasureSettings
from routing_lab.model import ModelFacts
from routing_lab.probes import ProbeSet
from routing_lab.schedule import Schedule
from routing_lab.search import Ending, Progress, Stop, StudyRecord, StudyResult, StudySettings, load_study, run_study
from routing_lab.search.dimensions import Dimensions, Point
from routing_lab.search.sensitivity import SingleCuts
from routing_lab.space import SearchSpace

FAST = MeasureSettings(rounds=6, tokens=8)


@pytest.fixture
def facts(tmp_path: Path) -> ModelFacts:
    return make_facts(tmp_path)


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return tmp_path / "s.db"


def run(facts: ModelFacts, storage: Path, *, runtime: Any = None, **changes: Any) -> StudyResult:
    space, probes = changes.pop("space", make_space((2, 4, 8))), changes.pop("probes", make_probes())
    on_progress = changes.pop("on_progress", None)
    settings = StudySettings(**{"trials": 6, "measure": FAST, "sampler": "random", "start": "map", **changes})
    return run_study(
        runtime or make_runtime(facts), probes, space, study="s", storage=storage, settings=settings,
        on_progress=on_progress,
    )  # fmt: skip


# --- the order -------------------------------------------------------------------------------------------------------


def asked_in_order(cuts: SingleCuts, passes: Mapping[Point, bool]) -> list[Point]:
    known: dict[Point, bool] = {}
    while ahead := cuts.ahead(known):
        known[ahead[0]] = passes[ahead[0]]
    return list(known)


def test_every_dimension_is_cut_deepest_first_and_one_that_passes_is_done(facts: ModelFacts) -> None:
    cuts = SingleCuts(Dimensions(make_space((2, 4, 8)), facts), gentler=True)
    passes = {(0, 2, 2, 2): False, (1, 2, 2, 2): True, (2, 0, 2, 2): True, (2, 2, 0, 2): False, (2, 2, 1, 2): False}
    order = asked_in_order(cuts, {**passes, (2, 2, 2, 0): True})
    assert order == [(0, 2, 2, 2), (2, 0, 2, 2), (2, 2, 0, 2), (2, 2, 2, 0), (1, 2, 2, 2), (2, 2, 1, 2)]


@given(st.data())
def test_the_pass_ends_and_asks_nothing_twice_whatever_passes(data: st.DataObject) -> None:
    dimensions = Dimensions(make_space((1, 2, 4, 8)), _facts())
    cuts = SingleCuts(dimensions, gentler=True)
    every = [cut for of_one in cuts.by_dimension for cut in of_one]
    passes = {cut: data.draw(st.booleans()) for cut in every}
    order = asked_in_order(cuts, passes)
    for of_one in cuts.by_dimension:
        wanted = next((depth for depth, cut in enumerate(of_one) if passes[cut]), len(of_one) - 1) + 1
        assert [cut for cut in order if cut in of_one] == list(of_one[:wanted])
    assert len(set(order)) == len(order)


def test_to_start_a_search_only_the_largest_cut_of_each_dimension_is_asked(facts: ModelFacts) -> None:
    cuts = SingleCuts(Dimensions(make_space((1, 2, 4, 8)), facts), gentler=False)
    assert cuts.ahead({}) == [(0, 3, 3, 3), (3, 0, 3, 3), (3, 3, 0, 3), (3, 3, 3, 0)]
    assert cuts.ahead({(0, 3, 3, 3): False, (3, 0, 3, 3): True}) == [(3, 3, 0, 3), (3, 3, 3, 0)]


def test_a_dimension_with_nothing_to_cut_is_left_out(facts: ModelFacts) -> None:
    assert SingleCuts(Dimensions(make_space((8, 16)), facts), gentler=True).ahead({}) == []


def _facts() -> ModelFacts:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return make_facts(Path(folder))


def test_a_space_that_cannot_leave_a_block_whole_is_refused_and_the_way_out_is_said(facts: ModelFacts) -> None:
    with pytest.raises(UsageError, match=r"own count, .* block 0, block 1.*add it to its counts"):
        SingleCuts(Dimensions(make_space((2, 4)), facts), gentler=False)


# --- in a study ------------------------------------------------------------------------------------------------------


def test_the_start_of_a_search_stops_at_the_first_failure_as_its_trials_do(facts: ModelFacts, storage: Path) -> None:
    needs = {f"g{number}": {0: 4} for number in range(12)}
    probes = make_probes(12)
    study = run(facts, storage, start="sensitivity", probes=probes, runtime=make_runtime(facts, needs)).study
    assert [trial.key for trial in study.single_cuts] == ["0:2,1-3:8", "0:8,1:2,2-3:8", "0-1:8,2:2,3:8", "0-2:8,3:2"]
    assert [trial.verdict.run for trial in study.single_cuts] == [8, 12, 12, 12]
    assert "✗8/8" in shown(study)
    assert "8/8" in [text.get_text() for text in report.figure_sensitivity(study).axes[0].texts]
    # A map asks again what was cut short, and what passed is known.
    study = run(facts, storage, start="map", probes=probes, runtime=make_runtime(facts, needs), trials=7).study
    assert [trial.key for trial in study.single_cuts[4:]] == ["0:2,1-3:8", "0:4,1-3:8"]
    assert study.single_cuts[4].verdict.run == 12
    assert "✗12" in shown(study)


def test_the_map_comes_first_asks_whole_gates_measures_nothing_and_is_not_counted(
    facts: ModelFacts, storage: Path
) -> None:
    study = run(facts, storage, space=make_space((1, 4, 8))).study
    alone = [trial for trial in study.trials if trial.origin == "sensitivity"]
    # g2 needs 4 in block 0 and g3 2 in block 3: their deepest cuts fail, and the gentler ones pass.
    keys = ["0:1,1-3:8", "0:8,1:1,2-3:8", "0-1:8,2:1,3:8", "0-2:8,3:1", "0:4,1-3:8", "0-2:8,3:4"]
    assert [trial.key for trial in alone] == keys
    assert study.trials[: len(keys)] == tuple(alone)
    assert study.single_cuts == tuple(alone)
    for trial in alone:
        assert trial.verdict.run == 4
        assert trial.speed is None
        assert trial.speed_skipped
        assert trial.attested == trial.key
        assert not trial.accepted
    assert [trial.verdict.failures for trial in alone] == [("g2",), (), (), ("g3",), (), ()]
    assert len(study.evaluated) == 6
    assert {trial.origin for trial in study.evaluated} == {"random"}


def test_a_cut_that_passed_is_still_searched_and_timed_and_one_that_failed_is_not(
    facts: ModelFacts, storage: Path
) -> None:
    result = run(facts, storage, space=make_space((2, 8)), trials=1000, runners_up=None)
    assert result.stopped is Stop.EXHAUSTED
    times = Counter(trial.key for trial in result.study.trials)
    failed = {trial.key for trial in result.study.single_cuts if trial.verdict.result is Result.FAIL}
    passed = {trial.key for trial in result.study.single_cuts} - failed
    assert failed == {"0:2,1-3:8"}
    assert {times[key] for key in passed} == {2}
    assert {times[key] for key in times if key not in passed} == {1}
    assert passed <= {trial.key for trial in result.candidates}


@pytest.mark.parametrize("at", [6, 14, 19])
def test_after_ctrl_c_in_the_pass_the_same_call_goes_on_with_the_next_cut(
    facts: ModelFacts, storage: Path, at: int
) -> None:
    asked = 0

    def fail(kind: str, _counts: Any) -> bool:
        nonlocal asked
        asked += kind == "generate"
        if asked == at + 16:  # behind the baseline and the calibration
            raise KeyboardInterrupt
        return False

    with pytest.raises(InterruptedStudyError) as caught:
        run(facts, storage, runtime=make_runtime(facts, fail=fail))
    before = load_study(storage)
    assert before.trials[-1].ending is Ending.INTERRUPTED
    if before.single_cuts:
        assert f"and what {len(before.single_cuts)} parts lose when cut alone are saved" in str(caught.value)
    study = run(facts, storage).study
    assert study.trials[: len(before.trials)] == before.trials
    keys = [trial.key for trial in study.single_cuts]
    assert keys == ["0:2,1-3:8", "0:8,1:2,2-3:8", "0-1:8,2:2,3:8", "0-2:8,3:2", "0:4,1-3:8"]
    assert len(study.evaluated) == 6


def test_a_cut_that_kills_the_model_twice_is_given_up_and_the_pass_goes_on(facts: ModelFacts, storage: Path) -> None:
    fatal = {0: 8, 1: 2, 2: 8, 3: 8}
    runtime = make_runtime(facts, fail=lambda request, counts: request == "generate" and dict(counts) == fatal)
    study = run(facts, storage, runtime=runtime).study
    of_it = [trial.ending for trial in study.trials if trial.key == "0:8,1:2,2-3:8"]
    assert of_it == [Ending.RUNTIME_ERROR] * 2
    assert len(study.single_cuts) == 5  # a gentler cut of the same block was asked instead
    assert len(study.evaluated) == 6


def test_a_session_out_of_time_stops_between_two_cuts_and_the_next_one_goes_on(
    facts: ModelFacts, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr("routing_lab.search.session.time.monotonic", lambda: 60.0 * next(clock))
    first = run(facts, storage, hours=0.1)
    assert first.stopped is Stop.HOURS
    assert 0 < len(first.study.single_cuts) < 5
    assert not first.study.evaluated
    assert len(run(facts, storage).study.single_cuts) == 5


def test_progress_says_how_much_of_the_pass_is_ahead(facts: ModelFacts, storage: Path) -> None:
    seen: list[Progress] = []
    run(facts, storage, on_progress=seen.append, trials=2)
    assert [(one.cuts_done, one.cuts_ahead, one.done) for one in seen] == [
        (0, 4, 0),
        (1, 4, 0),  # block 0 failed: it is asked once more, cut less
        (2, 3, 0),
        (3, 2, 0),
        (4, 1, 0),
        (5, 0, 0),
        (5, 0, 1),
        (5, 0, 2),
    ]
    assert all(one.seconds_left is None for one in seen[:6])
    assert seen[-1].seconds_left == 0


def test_a_finished_search_is_not_followed_by_a_pass(facts: ModelFacts, storage: Path) -> None:
    run(facts, storage, start="none")
    assert run(facts, storage).study.single_cuts == ()


def test_the_pass_may_be_added_to_a_study_that_began_without_it(facts: ModelFacts, storage: Path) -> None:
    run(facts, storage, start="uniform", space=make_space((2, 8)), runners_up=None, trials=12)
    study = run(facts, storage, space=make_space((2, 8)), runners_up=None, trials=15).study
    assert len(study.single_cuts) == 4
    assert len(study.evaluated) == 15


def test_without_drafts_the_pass_is_refused_and_where_they_are_no_evidence_uniform_schedules_stand_in(
    facts: ModelFacts, storage: Path
) -> None:
    for start in ("sensitivity", "map"):
        with pytest.raises(UsageError, match=r"drafts.*--plain"):
            StudySettings(start=start, verify=False)  # type: ignore[arg-type]
    runtime = make_runtime(facts, fail=lambda request, _counts: request == "verify")
    study = run(facts, storage, runtime=runtime).study
    assert study.baseline is not None
    assert study.baseline.calibration is not None
    assert study.baseline.calibration.reason
    assert study.single_cuts == ()
    assert [trial.key for trial in study.trials[:2]] == ["0-3:4", "0-3:2"]


def test_by_itself_a_study_begins_with_the_largest_cuts_where_drafts_are_checked_and_the_space_has_them(
    facts: ModelFacts, tmp_path: Path
) -> None:
    def begins(**changes: Any) -> list[str]:
        trials = run(facts, tmp_path / f"{len(list(tmp_path.iterdir()))}.db", start="auto", trials=2, **changes)
        return [trial.origin for trial in trials.study.trials]

    assert begins() == ["sensitivity"] * 4 + ["random"] * 2
    assert begins(verify=False) == ["uniform"] * 2
    assert begins(space=make_space((2, 4))) == ["uniform"] * 2


def test_none_begins_with_the_sampler(facts: ModelFacts, storage: Path) -> None:
    assert {trial.origin for trial in run(facts, storage, start="none").study.trials} == {"random"}


def test_an_unknown_start_is_refused() -> None:
    with pytest.raises(UsageError, match="auto, sensitivity, map, uniform, none"):
        StudySettings(start="lexi")  # type: ignore[arg-type]


def test_what_the_policy_excuses_is_no_failure_of_a_cut(facts: ModelFacts, storage: Path) -> None:
    runtime = make_runtime(facts, NEEDS | {"g0": {0: 99}})
    study = run(facts, storage, runtime=runtime, policy=Policy(Rule.NO_WORSE_THAN_BASELINE)).study
    assert {cell.failed for cell in report.single_cuts(study)} == {0, 1}


# --- what people see -------------------------------------------------------------------------------------------------


@pytest.fixture
def study(facts: ModelFacts, storage: Path) -> StudyRecord:
    return run(facts, storage, space=make_space((1, 4, 8))).study


def shown(study: StudyRecord, width: int = 80) -> str:
    console = Console(width=width, color_system=None, record=True, file=io.StringIO())
    console.print(report.sensitivity_table(study))
    return console.export_text()


def test_the_map_has_a_cell_for_every_cut_that_was_asked(study: StudyRecord) -> None:
    cells = {(cell.blocks, cell.count): cell for cell in report.single_cuts(study)}
    assert set(cells) == {((0,), 1), ((0,), 4), ((1,), 1), ((2,), 1), ((3,), 1), ((3,), 4)}
    assert {place for place, cell in cells.items() if cell.failed} == {((0,), 1), ((3,), 1)}
    # Of the four answers of ten tokens ("Answer: 2" and the end) one parts from the baseline's before its number.
    assert cells[(0,), 1].kept_share == pytest.approx((3 * 10 + 8) / 40)
    assert cells[(1,), 1].kept_share == 1
    assert json.loads(json.dumps(report.sensitivity_fields(study)))[0]["blocks"] == [0]


def test_the_table_says_share_kept_failures_and_what_was_not_asked(study: StudyRecord) -> None:
    lines = shown(study).splitlines()
    assert [line.split() for line in lines[1:6]] == [
        ["cut", "alone", "to", "4", "to", "1"],
        ["0", "100.0", "%", "✓", "95.0", "%", "✗1"],
        ["1", "·", "100.0", "%", "✓"],
        ["2", "·", "100.0", "%", "✓"],
        ["3", "100.0", "%", "✓", "95.0", "%", "✗1"],
    ]


def test_bands_and_fixed_blocks_are_named_as_the_space_has_them(facts: ModelFacts, storage: Path) -> None:
    space = SearchSpace((2, 4, 8), bands=((0, 1), (2,)), fixed={3: 4})
    result = run(facts, storage, space=space)
    cells = report.single_cuts(result.study)
    assert {cell.blocks for cell in cells} == {(0, 1), (2,)}
    assert "0-1" in shown(result.study)


def test_the_figure_numbers_the_failures_and_leaves_what_was_not_asked_empty(study: StudyRecord) -> None:
    figure = report.figure_sensitivity(study)
    axes = figure.axes[0]
    assert len(axes.patches) == 4 * 2
    assert Counter(text.get_text() for text in axes.texts) == {"0": 4, "1": 2}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "2", "3"]


def test_a_study_without_the_pass_has_no_map(facts: ModelFacts, storage: Path) -> None:
    bare = run(facts, storage, start="none").study
    assert report.sensitivity_fields(bare) == []
    with pytest.raises(UsageError, match="--start map makes one"):
        report.figure_sensitivity(bare)


# --- on the demo model -----------------------------------------------------------------------------------------------


@pytest.mark.model
def test_on_the_demo_model_the_pass_finds_the_block_that_matters_and_the_report_draws_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SearchSpace((1, 8), bands=((0,), (4,))).save(tmp_path / "space.yaml")
    probes = ProbeSet.load(probes_path())
    replace(probes, items=probes.split("gate")[::5]).save(tmp_path / "probes.yaml")
    named = ["--study", "s", "--storage", str(tmp_path / "s.db")]
    given = ["--space", str(tmp_path / "space.yaml"), "--probes", str(tmp_path / "probes.yaml")]
    quick = ["--start", "map", "--trials", "1", "--tokens", "8", "--threads", "1", "--context", "512", "--json"]
    code = main(["search", *named, *given, *quick])
    found = json.loads(capsys.readouterr().out)
    assert code in {0, 5}
    first, last = found["sensitivity"]
    assert (first["blocks"], last["blocks"]) == ([0], [4])
    assert first["failed"] > last["failed"]
    assert first["kept_share"] < last["kept_share"]
    assert [trial["speed"] for trial in found["trials"][:2]] == [None, None]
    picture = tmp_path / "map.png"
    assert main(["report", *named, "--sensitivity", str(picture)]) == 0
    assert "What each part loses alone" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plain_and_the_pass_exclude_each_other_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["search", "--storage", str(tmp_path / "s.db"), "--start", "sensitivity", "--plain"])
    assert code == 2
    assert "--plain" in capsys.readouterr().err


def test_a_space_without_the_models_own_count_is_refused_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "space.yaml").write_text("space: low\ncounts: [2, 4]\nper_block: true\n")
    storage = str(tmp_path / "s.db")
    code = main(["search", "--storage", storage, "--start", "sensitivity", "--space", str(tmp_path / "space.yaml")])
    assert code == 2
    assert "add it to its counts" in capsys.readouterr().err


def test_the_baseline_schedule_is_no_cut(facts: ModelFacts) -> None:
    dimensions = Dimensions(make_space((2, 4, 8)), facts)
    own = dimensions.point_of(Schedule.baseline(facts))
    assert all(own not in cuts for cuts in SingleCuts(dimensions, gentler=True).by_dimension)
