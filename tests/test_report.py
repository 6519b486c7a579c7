"""What people are shown: tables that fit their terminal, strips that need no colour, frames and figures that carry the data."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from fakelab import make_facts, make_probes, make_runtime, make_space, schedule, speed
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from routing_lab import report
from routing_lab.errors import UsageError
from routing_lab.evaluate import Evaluation, evaluate
from routing_lab.model import BlockBytes, ModelFacts
from routing_lab.report.strip import BlockKind
from routing_lab.schedule import Schedule
from routing_lab.search import StudyRecord, StudySettings, run_study
from routing_lab.validate import Validation, validate

FIGURE_1 = Path(__file__).parent.parent / "schedules" / "figure-1"
# Twelve probes of different hardness, so that a study has failures of every size.
NEEDS = {f"g{i}": {i % 4: 1 + i % 6, (i + 1) % 4: 1 + i % 3} for i in range(12)} | {"h3": {2: 5}}


@dataclass(frozen=True)
class Lab:
    facts: ModelFacts
    study: StudyRecord
    evaluation: Evaluation
    validation: Validation


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """One study, one evaluation and one acceptance run of a fake model on a machine with noise."""
    folder = tmp_path_factory.mktemp("lab")
    facts, probes, noise = make_facts(folder), make_probes(12, 20), random.Random(1)
    runtime = make_runtime(facts, NEEDS, speed=lambda counts: speed(counts) * noise.uniform(0.97, 1.03))
    settings = StudySettings(trials=30, stop_after_failures=None, runners_up=None, order="speed", start="uniform")
    study = run_study(
        runtime, probes, make_space((1, 2, 3, 4, 6, 8)), study="s", storage=folder / "s.db", settings=settings
    )
    given = [Schedule.uniform(count, facts) for count in (6, 4, 1)]
    return Lab(
        facts,
        study.study,
        evaluate(runtime, probes, given),
        validate(runtime, probes, [trial.schedule for trial in study.candidates[:2]] + [schedule(8, 8, 8, 4)]),
    )


def shown(table: RenderableType, width: int = 80) -> str:
    console = Console(width=width, color_system=None, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


TABLES: dict[str, Callable[[Lab], RenderableType]] = {
    "evaluation": lambda lab: report.evaluation_table(lab.evaluation),
    "screening": lambda lab: report.screening_table(lab.study),
    "validated": lambda lab: report.validated_table(lab.validation.results),
    "certificate": lambda lab: report.certificate_table(lab.validation.require_certificate()),
}


# ---------------------------------------------------------------------------------------------------------------------
# Placements


def elsewhere(study: StudyRecord, placement: str, **identity: str) -> StudyRecord:
    return replace(study, name="other", identity={**study.identity, "placement": placement, **identity})


def test_studies_of_two_placements_stand_in_columns_of_their_own(lab: Lab) -> None:
    other = elsewhere(lab.study, "the last 99 layers on the device")
    rows = report.joint_rows([lab.study, other])
    assert {row.key for row in rows} == {trial.key for trial in lab.study.evaluated if trial.accepted}
    assert all(row.trials[0] == row.trials[1] for row in rows)
    # In the order of their experts, which ranks nobody.
    totals = [row.total_experts for row in rows]
    assert totals == sorted(totals, reverse=True)
    text = shown(report.joint_table([lab.study, other]), width=200)
    assert "s: everything in host memory" in text
    assert "other: the last 99 layers on the device" in text
    fields = report.joint_fields([lab.study, other])
    assert [study["placement"] for study in fields["studies"]] == [
        "everything in host memory",
        "the last 99 layers on the device",
    ]


def test_a_schedule_that_a_study_did_not_evaluate_has_an_empty_cell(lab: Lab) -> None:
    none = replace(elsewhere(lab.study, "elsewhere"), trials=())
    assert all(row.trials[1] is None for row in report.joint_rows([lab.study, none]))


@pytest.mark.parametrize("label", ["model", "baseline", "probes"])
def test_studies_that_ask_another_question_do_not_stand_side_by_side(lab: Lab, label: str) -> None:
    with pytest.raises(UsageError, match=f"another {label}"):
        report.joint_rows([lab.study, elsewhere(lab.study, "x", **{label: "other"})])
    with pytest.raises(UsageError, match="at least two"):
        report.joint_rows([lab.study])


def test_a_frame_of_two_placements_has_no_frontier_and_no_figure(lab: Lab) -> None:
    import pandas as pd

    both = pd.concat([report.study_frame(lab.study), report.study_frame(elsewhere(lab.study, "elsewhere"))])
    for rank in (report.frontier, report.figure_frontier):
        with pytest.raises(UsageError, match="different placements do not rank"):
            rank(both)
    report.frontier(report.study_frame(lab.study))


def test_a_screening_table_names_its_placement(lab: Lab) -> None:
    assert "Placement: everything in host memory." in shown(report.screening_table(lab.study))


# ---------------------------------------------------------------------------------------------------------------------
# Tables


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("width", [80, 120])
def test_a_table_fits_its_terminal_and_cuts_nothing_off(name: str, width: int, lab: Lab) -> None:
    text = shown(TABLES[name](lab), width)
    assert max(map(len, text.splitlines())) <= width
    # An ellipsis at the end of a word is rich's sign for a cell that was cut.
    assert not [word for word in text.split() if len(word) > 1 and word.endswith("…")]


def test_every_table_says_in_its_title_which_stage_it_shows(lab: Lab) -> None:
    titles = {name: shown(table(lab)).splitlines()[0] for name, table in TABLES.items()}
    assert "Screening, not validated" in titles["screening"]
    assert "(validated)" in titles["validated"]
    assert "(validated)" in titles["certificate"]
    assert "valid" not in titles["evaluation"]


def test_figure_1_has_for_each_schedule_ratio_interval_rate_and_status(lab: Lab) -> None:
    text = shown(report.evaluation_table(lab.evaluation), 120)
    for row in (lab.evaluation.baseline, *lab.evaluation.rows):
        (line,) = (line for line in text.splitlines() if line.startswith(f"{row.schedule.name} "))
        assert row.speed is not None
        for cell in (f"{row.speed.ratio:.3f}", f"[{row.speed.low:.3f}", f"{row.speed.candidate_tokens_per_s:,.1f}"):
            assert cell in line
        assert ("12/12 correct" if row.verdict.failed == 0 else f"{row.verdict.failed} of 12 wrong") in line


def test_a_name_that_does_not_fit_stands_above_its_row_and_no_row_takes_two_lines(lab: Lab) -> None:
    long = "a-schedule-with-a-long-name"
    named = replace(
        lab.evaluation,
        rows=tuple(replace(row, schedule=replace(row.schedule, name=long)) for row in lab.evaluation.rows),
    )
    lines = shown(report.evaluation_table(named), 80).splitlines()
    at = [number for number, line in enumerate(lines) if line.rstrip() == long]
    assert len(at) == len(named.rows)
    assert all("12" in lines[number + 1] and "[" in lines[number + 1] for number in at)
    assert sum(line.startswith(f"{long} ") for line in shown(report.evaluation_table(named), 160).splitlines()) == 3


def test_seconds_of_one_table_have_as_many_decimals_in_every_row(lab: Lab) -> None:
    seconds = re.findall(r"(\d\S*) +[✓✗]", shown(report.evaluation_table(lab.evaluation), 160))
    assert len(seconds) == 1 + len(lab.evaluation.rows)
    assert len({len(one.partition(".")[2]) for one in seconds}) == 1


@pytest.mark.parametrize(
    ("confidence", "head"),
    [(0.95, "[95 %]"), (0.9875, "[98.75 %]"), (0.9916666666666667, "[99.16 %]"), (0.99, "[99 %]")],
)
def test_no_head_of_an_interval_promises_more_than_the_interval_has(lab: Lab, confidence: float, head: str) -> None:
    baseline = lab.evaluation.baseline
    assert baseline.speed is not None
    other = replace(baseline, speed=replace(baseline.speed, confidence=confidence))
    assert head in shown(report.evaluation_table(replace(lab.evaluation, baseline=other)))


def test_a_gate_that_stopped_early_counts_the_wrong_answers_of_those_asked(lab: Lab) -> None:
    failed = next(row for row in lab.evaluation.rows if row.verdict.failed)
    stopped = replace(failed, verdict=replace(failed.verdict, failures=failed.verdict.failures[:1], run=8, total=60))
    assert "1 of 8 wrong" in shown(report.evaluation_table(replace(lab.evaluation, rows=(stopped,))), 120)


def test_a_schedule_that_could_not_be_measured_says_why(lab: Lab) -> None:
    broken = replace(lab.evaluation.rows[0], speed=None, error="the model's process died")
    text = shown(report.evaluation_table(replace(lab.evaluation, rows=(broken,))))
    assert "not measured" in text
    assert f"{broken.schedule.name}: the model's process died" in text


def test_screening_shows_the_fastest_that_passed_and_only_faster_ones_that_failed(lab: Lab) -> None:
    rows = [line.split() for line in shown(report.screening_table(lab.study), 120).splitlines()]
    numbers = [int(row[0]) for row in rows if row and row[0].isdecimal()]
    trials = {trial.number: trial for trial in lab.study.trials}
    passed = [number for number in numbers if trials[number].accepted]
    failed = [number for number in numbers if not trials[number].accepted]
    assert passed
    assert failed
    assert numbers == passed + failed
    ratios = [trials[number].speed.ratio for number in passed]
    assert ratios == sorted(ratios, reverse=True)
    assert all(trials[number].speed.ratio > ratios[0] for number in failed)


def test_screening_names_the_probes_that_the_baseline_fails(lab: Lab) -> None:
    assert lab.study.baseline is not None
    verdict = replace(lab.study.baseline.verdict, failures=("g3", "g7"))
    text = shown(report.screening_table(replace(lab.study, baseline=replace(lab.study.baseline, verdict=verdict))))
    assert "Probes that the baseline fails: g3, g7." in text


def test_a_study_without_results_still_makes_a_table(lab: Lab) -> None:
    text = shown(report.screening_table(replace(lab.study, trials=(), baseline=None)))
    assert "0 schedules, 0 passed" in text
    assert "The baseline was not measured yet." in text


def test_the_even_spread_of_the_same_total_stands_below_its_schedule(lab: Lab) -> None:
    lines = shown(report.validated_table(lab.validation.results), 120).splitlines()
    for result in lab.validation.results:
        if result.even_spread is not None:
            at = next(i for i, line in enumerate(lines) if line.startswith(f"{result.schedule.name} "))
            assert lines[at + 2].startswith(f"└ {result.even_spread.schedule.name} ")


def test_a_refused_schedule_is_followed_by_every_objection(lab: Lab) -> None:
    text = " ".join(shown(report.validated_table(lab.validation.results)).split())
    refused = [result for result in lab.validation.results if not result.acceptance.accepted]
    assert refused
    assert all(
        f"{result.schedule.name}: {reason}" in text for result in refused for reason in result.acceptance.reasons
    )


def test_an_even_spread_that_is_refused_says_why(lab: Lab) -> None:
    one = next(one for one in lab.validation.results if one.even_spread)
    refused = replace(one, even_spread_reasons=("gate: fail: 1 probe failed: g7",))
    assert refused.even_spread is not None
    said = f"└ {refused.even_spread.schedule.name}: gate: fail: 1 probe failed: g7"
    assert said in shown(report.validated_table([refused]), 120)


def test_the_table_of_an_acceptance_run_says_what_its_certificate_says_and_shows_no_schedule_twice(lab: Lab) -> None:
    certificate = lab.validation.require_certificate()
    lines = shown(report.validated_table(lab.validation.results, certificate), 200).splitlines()
    assert any(
        line.startswith("Rule: every gate probe correct") and "interval wholly above 1" in line for line in lines
    )
    keys = [line.strip() for line in lines if line.strip() == certificate.schedule.experts_used.replace(",", ", ")]
    assert len(keys) == 1


def test_a_pass_with_excused_probes_says_so(lab: Lab) -> None:
    row = lab.evaluation.rows[0]
    excusing = replace(row, verdict=replace(row.verdict, passed=11, excused=("g3",)))
    assert "11/12 correct, 1 excused" in shown(report.evaluation_table(replace(lab.evaluation, rows=(excusing,))), 120)


def test_what_was_lost_and_gained_on_the_holdout_is_named(lab: Lab) -> None:
    first = lab.validation.results[0]
    holdout = replace(first.holdout, lost=tuple(f"h{i}" for i in range(7)), gained=("h9",))
    text = " ".join(shown(report.validated_table([replace(first, holdout=holdout)])).split())
    assert "7 lost (h0, h1, h2, h3, h4 and 2 more), 1 gained (h9)." in text


def test_a_slower_schedule_that_gets_the_certificate_is_explained(lab: Lab) -> None:
    fast = next(one for one in lab.validation.results if one.acceptance.accepted)
    slower = replace(
        fast,
        schedule=replace(fast.schedule, name="slower"),
        speed=replace(fast.speed, ratio=fast.speed.low),
        holdout=replace(fast.holdout, candidate_correct=fast.holdout.candidate_correct + 1),
    )
    why = f"{fast.schedule.name} and slower are equally fast within the intervals; slower has more right answers"
    assert why in " ".join(shown(report.validated_table([fast, slower])).split())
    assert "equally fast" not in shown(report.validated_table([fast]))


def test_a_machine_that_was_not_quiet_is_named_after_an_acceptance_run(lab: Lab) -> None:
    first = lab.validation.results[0]
    rates = tuple(10.0 if number == 3 else 100.0 + number % 2 for number in range(24))
    loud = replace(first, speed=replace(first.speed, baseline_rates=rates))
    assert "The machine was not quiet (measuring" in shown(report.validated_table([loud]))
    assert replace(lab.validation, results=(loud,)).warnings()


# ---------------------------------------------------------------------------------------------------------------------
# Strips


def deep_facts(blocks: int, own: int = 8, dense: int = 0, mtp: int = 0) -> ModelFacts:
    """A model of which only the blocks matter: dense ones first, blocks for multi-token prediction last."""
    routed = range(dense, blocks - mtp)
    return ModelFacts(
        files=(Path("model.gguf"),),
        name="deep",
        architecture="qwen3moe",
        blocks=blocks,
        mtp_blocks=tuple(range(blocks - mtp, blocks)),
        routed_blocks=tuple(routed),
        dense_blocks=tuple(range(dense)),
        experts=256,
        experts_used=dict.fromkeys(routed, own),
        shared_experts=0,
        embedding_length=64,
        expert_feed_forward_length=64,
        context_length=None,
        has_chat_template=False,
        quantization="Q8_0",
        parameters=1,
        size_bytes=1,
        block_bytes={block: BlockBytes() for block in range(blocks)},
        other_bytes=0,
    )


@pytest.mark.parametrize("blocks", [41, 48, 61, 64])
def test_a_strip_of_a_deep_model_is_one_row_in_80_columns(blocks: int) -> None:
    facts = deep_facts(blocks)
    lines = report.schedule_strip(Schedule.uniform(5, facts), facts, width=80).plain.splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= 80
    assert lines[2].split() == ["count", "5" * blocks]


def test_a_strip_reads_without_colour() -> None:
    facts = deep_facts(41, dense=1, mtp=1)
    cut = Schedule.from_counts("late-4", dict.fromkeys(range(33, 40), 4))
    ruler, bars, counts, legend = report.schedule_strip(cut, facts).plain.splitlines()
    assert ruler.index("10") - ruler.index("0") == 10
    assert bars.strip() == "─" + "█" * 32 + "▄" * 7 + "x"
    assert counts.removeprefix("count  ") == " " + "8" * 32 + "4" * 7
    assert legend.strip() == "─ dense block · x stored, not run in the main pass"


def test_counts_of_two_digits_are_written_downwards_where_they_would_touch() -> None:
    facts = deep_facts(64, own=12)
    lines = report.schedule_strip(Schedule.from_counts("cut", {63: 5}), facts).plain.splitlines()
    assert lines[2].strip() == "1" * 63
    assert lines[3].removeprefix("count").strip() == "2" * 63 + "5"
    roomy = report.schedule_strip(Schedule.baseline(few := deep_facts(6, own=12)), few).plain
    assert roomy.splitlines()[2].split() == ["count"] + ["12"] * 6


@given(
    counts=st.lists(st.integers(1, 256), min_size=1, max_size=130),
    own=st.integers(1, 256),
    dense=st.integers(0, 3),
    mtp=st.integers(0, 2),
    width=st.integers(20, 200),
)
def test_any_schedule_of_any_depth_keeps_to_the_width_and_shows_every_count(
    counts: list[int], own: int, dense: int, mtp: int, width: int
) -> None:
    facts = deep_facts(len(counts) + dense + mtp, own, dense, mtp)
    given = Schedule.from_counts("any", dict(zip(facts.routed_blocks, counts, strict=True)))
    text = report.schedule_strip(given, facts, width=width)
    assert max(map(len, text.plain.splitlines())) <= width
    digits = sum(len(str(count)) for count in counts)
    body = [line for line in text.plain.splitlines() if not line.startswith("block")]
    assert sum(mark.isdecimal() for line in body for mark in line) == digits


def test_cells_say_what_each_block_is() -> None:
    facts = replace(deep_facts(6, dense=1, mtp=1), dense_blocks=())
    cells = report.strip_cells(Schedule.from_counts("cut", {2: 3}), facts)
    assert [cell.kind for cell in cells] == [BlockKind.FIXED, *[BlockKind.ROUTED] * 4, BlockKind.MTP]
    assert [(cell.count, cell.own) for cell in cells] == [(0, 0), (8, 8), (3, 8), (8, 8), (8, 8), (0, 0)]


def test_a_strip_narrower_than_its_margin_is_a_usage_error(lab: Lab) -> None:
    with pytest.raises(UsageError, match="at least 20 columns"):
        report.schedule_strip(Schedule.baseline(lab.facts), lab.facts, width=10)


# ---------------------------------------------------------------------------------------------------------------------
# Frames


def test_a_study_frame_has_a_typed_row_per_trial(lab: Lab) -> None:
    frame = report.study_frame(lab.study)
    assert len(frame) == len(lab.study.trials)
    assert set(frame["stage"]) == {"screening"}
    for row, trial in zip(frame.to_dict("records"), lab.study.trials, strict=True):
        assert row["trial"] == trial.number
        assert row["schedule"] == trial.key
        assert row["speed_ratio"] == trial.speed.ratio
        assert row["share_correct"] == trial.verdict.passed / trial.verdict.total
        assert {f"block_{block}": count for block, count in trial.schedule.experts_used}.items() <= row.items()
    assert not [name for name, kind in frame.dtypes.items() if kind == object]  # noqa: E721


def test_frames_without_rows_keep_their_columns_and_types(lab: Lab) -> None:
    empty = report.study_frame(replace(lab.study, trials=()))
    full = report.study_frame(lab.study)
    fixed = [name for name in full.columns if name not in report.block_columns(full)]
    assert list(empty.columns) == fixed
    assert empty.dtypes["speed_ratio"] == full.dtypes["speed_ratio"]


def test_the_share_of_a_gate_that_stopped_early_is_of_the_probes_that_were_asked(lab: Lab) -> None:
    trial = lab.study.trials[0]
    stopped = replace(trial, verdict=replace(trial.verdict, passed=6, failed=2, run=8, total=60))
    (row,) = report.study_frame(replace(lab.study, trials=(stopped,))).to_dict("records")
    assert (row["asked"], row["probes_total"], row["share_correct"]) == (8, 60, 0.75)


def test_a_trial_whose_gate_did_not_run_has_no_share(lab: Lab) -> None:
    trial = lab.study.trials[0]
    skipped = replace(trial, verdict=replace(trial.verdict, run=0, passed=0), outcomes=(), gate_skipped="too slow")
    frame = report.study_frame(replace(lab.study, trials=(skipped,)))
    assert frame["share_correct"].isna().all()
    assert list(frame["gate_skipped"]) == ["too slow"]


def test_block_effects_average_the_trials_that_gave_a_block_a_count(lab: Lab) -> None:
    frame = report.study_frame(lab.study)
    effects = report.block_effects(frame)
    assert list(effects.index) == [0, 1, 2, 3]
    for block, row in effects.iterrows():
        for count, mean in row.items():
            assert mean == pytest.approx(frame[frame[f"block_{block}"] == count]["share_correct"].mean(), nan_ok=True)


@given(points=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=30))
def test_the_frontier_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    import pandas as pd

    frame = pd.DataFrame(points, columns=["speed_ratio", "share_correct"]).astype("float64")
    found = [tuple(row) for row in report.frontier(frame).to_numpy()]
    beaten = {(x, y) for x, y in points for a, b in points if (a, b) != (x, y) and a >= x and b >= y}
    assert found == sorted(set(points) - beaten)


def test_the_published_figure_1_is_read_from_its_schedules() -> None:
    frame = report.published_frame([Schedule.load(path) for path in sorted(FIGURE_1.glob("*.yaml"))])
    rates = dict(zip(frame["tokens_per_s"], frame["status"], strict=False))
    assert list(frame["tokens_per_s"]) == [93.6, 100.1, 108.6, 109.4, 111.1, 111.5, 111.5, 112.2, 117.0]
    assert rates[112.2] == rates[117.0] == "no_final_answer"
    assert list(frame["status"]).count("wrong_answer") == 1
    assert frame["speed_ratio"].iloc[-1] == pytest.approx(117.0 / 93.6)
    assert frame["ratio_low"].isna().all()


def test_published_and_own_results_have_the_same_columns_and_different_stages(lab: Lab) -> None:
    own = report.evaluation_frame(lab.evaluation)
    published = report.published_frame([Schedule.load(path) for path in sorted(FIGURE_1.glob("*.yaml"))])
    assert list(own.columns) == list(published.columns)
    assert set(own["stage"]) == {"evaluation"}
    assert set(published["stage"]) == {"published"}
    assert list(own["status"]) == ["correct", "correct", "wrong_answer", "wrong_answer"]


def test_schedules_without_a_published_result_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="no published rate and status in given"):
        report.published_frame([schedule(4, 4)])


def test_published_results_need_their_baseline() -> None:
    cut = [Schedule.load(path) for path in sorted(FIGURE_1.glob("*.yaml"))][1:]
    with pytest.raises(UsageError, match="none of the published schedules is the baseline"):
        report.published_frame(cut)


# ---------------------------------------------------------------------------------------------------------------------
# Figures, by the data that they carry


def legend_of(figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_the_frontier_figure_has_a_point_for_every_trial(lab: Lab) -> None:
    frame = report.study_frame(lab.study)
    figure = report.figure_frontier(frame)
    (axes,) = figure.axes
    drawn = [tuple(point) for container in axes.containers for point in container[0].get_xydata()]
    assert sorted(drawn) == sorted(zip(frame["speed_ratio"], frame["share_correct"], strict=True))
    markers = {container[0].get_marker() for container in axes.containers}
    assert len(markers) == len(axes.containers) == frame["verdict"].nunique()
    assert legend_of(figure) == ["every probe correct", "a probe failed", "nothing beats these"]
    assert "not validated" in axes.get_title(loc="left")
    assert "until the run stopped" not in axes.get_ylabel()


def test_no_axis_of_the_frontier_figure_promises_more_than_all_answers(lab: Lab) -> None:
    (axes,) = report.figure_frontier(report.study_frame(lab.study)).axes
    assert axes.get_ylim()[1] == 1
    assert "trials (" in axes.get_title(loc="left")


def test_where_only_what_passed_was_timed_the_figure_shows_experts_and_says_how_many_were_not(lab: Lab) -> None:
    frame = report.study_frame(lab.study)
    untimed = ["speed_ratio", "ratio_low", "ratio_high"]
    frame.loc[frame["verdict"] != "pass", untimed] = float("nan")
    figure = report.figure_frontier(frame)
    (axes,) = figure.axes
    passed = frame[frame["verdict"] == "pass"]
    drawn = [tuple(point) for container in axes.containers for point in container[0].get_xydata()]
    assert sorted(drawn) == sorted(zip(passed["speed_ratio"], passed["total_experts"], strict=True))
    assert f"{len(passed)} of {len(frame)} trials were timed" in axes.get_title(loc="left")
    fastest = passed.loc[passed["speed_ratio"].idxmax(), "trial"]
    assert f"fastest: trial {fastest}" in [text.get_text() for text in axes.texts]
    assert legend_of(figure) == ["every probe correct"]
    low, high = axes.get_xlim()
    assert low <= passed["ratio_low"].min()
    assert passed["ratio_high"].max() <= high


def test_the_frontier_figure_says_where_a_gate_failed_fast(lab: Lab) -> None:
    frame = report.study_frame(lab.study).assign(asked=1)
    assert "until the run stopped" in report.figure_frontier(frame).axes[0].get_ylabel()


def test_a_study_without_results_has_no_figure(lab: Lab) -> None:
    with pytest.raises(UsageError, match="no finished trial"):
        report.figure_frontier(report.study_frame(replace(lab.study, trials=())))


def test_the_published_figure_has_both_panels_with_every_schedule(lab: Lab) -> None:
    published = report.published_frame([Schedule.load(path) for path in sorted(FIGURE_1.glob("*.yaml"))])
    own = report.evaluation_frame(lab.evaluation)
    figure = report.figure_published(published, own)
    for axes, frame in zip(figure.axes, (published, own), strict=True):
        by_speed = frame.sort_values("speed_ratio", kind="stable")
        assert [label.get_text() for label in axes.get_yticklabels()] == list(by_speed["schedule"])
        assert "baseline" in axes.get_xlabel()
    assert legend_of(figure) == ["correct", "wrong answer", "no final answer"]


def test_the_strip_figure_numbers_every_routed_block_and_hatches_the_others() -> None:
    facts = deep_facts(41, mtp=1)
    cut = Schedule.from_counts("late-4", dict.fromkeys(range(33, 40), 4))
    (axes,) = report.figure_strip([Schedule.baseline(facts), cut], facts).axes
    assert [text.get_text() for text in axes.texts] == ["8"] * 40 + ["8"] * 33 + ["4"] * 7
    assert sum(bool(patch.get_hatch()) for patch in axes.patches) == 2
    assert [label.get_text() for label in axes.get_yticklabels()] == ["baseline", "late-4"]


def test_a_strip_figure_needs_a_schedule(lab: Lab) -> None:
    with pytest.raises(UsageError, match="at least one schedule"):
        report.figure_strip([], lab.facts)


def test_drawing_leaves_the_callers_matplotlib_as_it_was(lab: Lab) -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    report.figure_frontier(report.study_frame(lab.study))
    assert dict(mpl.rcParams) == before


def test_a_name_with_dollar_signs_is_drawn_as_text_and_no_formula(lab: Lab) -> None:
    counts = lab.facts.experts_used
    drawn = report.figure_strip([Schedule.from_counts(r"costs $\frac$ [/x]", dict(counts))], lab.facts)
    drawn.savefig(io.BytesIO(), format="png")
    (axes,) = drawn.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [r"costs $\frac$ [/x]"]
