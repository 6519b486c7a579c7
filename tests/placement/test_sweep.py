"""Placement sweeps: turns, ratios, what is counted meanwhile, and placements that cannot be loaded."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from modelfiles import make_facts
from rich.console import Console, RenderableType

from routing_lab.errors import RuntimeFailureError, RuntimeUnsupportedError, UsageError
from routing_lab.placement import Placement
from routing_lab.placement import sweep as sweeping
from routing_lab.placement.published import PublishedTable
from routing_lab.placement.sweep import (
    Choice,
    SweepRow,
    SweepSettings,
    Taken,
    distinct,
    expert_placements,
    layer_placements,
    sweep,
)
from routing_lab.report import figure_sweep, memory_table, published_table, sweep_table
from routing_lab.runtime.base import DecodeTiming
from routing_lab.runtime.libllama import Buffer

FACTS = make_facts({1: 8, 2: 8, 3: 8, 4: 8}, blocks=6, mtp=(5,))
ONE, TWO, THREE = Placement(7, name="one"), Placement(7, (1,), "two"), Placement(3, name="three")


@dataclass
class FakeMachine:
    """Decodes 100 tokens per second, twice as many under ``two``; notes every load and every stretch."""

    broken: str = ""
    failing: str = ""
    opened: list[str] = field(default_factory=list)
    loaded: int = 0
    most_loaded: int = 0

    @contextlib.contextmanager
    def open(self, placement: Placement) -> Iterator[FakeLoaded]:
        if placement.name == self.broken:
            raise RuntimeUnsupportedError("out of memory")
        self.opened.append(placement.name)
        self.loaded += 1
        self.most_loaded = max(self.most_loaded, self.loaded)
        try:
            yield FakeLoaded(placement, failing=placement.name == self.failing)
        finally:
            self.loaded -= 1


@dataclass
class FakeLoaded:
    placement: Placement
    failing: bool
    process_id: int | None = None
    buffers: tuple[Buffer, ...] = (
        Buffer("GPU0", "model", 70),
        Buffer("GPU0", "KV", 7),
        Buffer("CPU_Mapped", "model", 5),
        Buffer("CUDA_Host", "compute", 1),
    )

    def decode_timing(self, *, tokens: int, prompt_tokens: int = 16) -> DecodeTiming:
        if self.failing:
            raise RuntimeFailureError("the process died")
        return DecodeTiming(tokens, tokens / (200 if self.placement.name == "two" else 100))


def test_placements_take_turns_and_the_order_turns_around() -> None:
    machine = FakeMachine()
    sweep(machine.open, [ONE, TWO, THREE])
    assert machine.opened == ["one", "two", "three", "three", "two", "one"] * 3
    assert machine.most_loaded == 1


def test_a_sweep_can_keep_every_placement_loaded() -> None:
    machine = FakeMachine()
    sweep(machine.open, [ONE, TWO], SweepSettings(keep_loaded=True))
    assert machine.opened == ["one", "two"]
    assert (machine.most_loaded, machine.loaded) == (2, 0)


def test_rows_compare_with_the_first_placement_and_add_up_both_sides() -> None:
    one, two = sweep(FakeMachine().open, [ONE, TWO])
    assert one.ratio.ratio == pytest.approx(1)
    assert two.ratio.ratio == pytest.approx(2)
    assert two.tokens_per_s == pytest.approx(200)
    assert (two.device_bytes, two.host_bytes) == (77, 6)


@pytest.mark.parametrize("how", ["broken", "failing"])
def test_a_placement_that_does_not_run_gets_a_row_that_says_so(how) -> None:
    machine = FakeMachine(**{how: "one"})
    one, two = sweep(machine.open, [ONE, TWO])
    assert one.error in {"out of memory", "the process died"}
    assert one.tokens_per_s is None
    assert two.ratio.ratio == pytest.approx(1)
    assert machine.opened.count("one") <= 1
    assert machine.loaded == 0


def test_nothing_to_measure_and_too_few_rounds_are_refused() -> None:
    with pytest.raises(UsageError):
        sweep(FakeMachine().open, [])
    with pytest.raises(ValueError, match="at least 6"):
        SweepSettings(rounds=5)


def test_blocks_are_the_first_ones_with_experts_or_a_range() -> None:
    placements = expert_placements(FACTS, ["0", " 2", "3-4"])
    assert [placement.host_experts for placement in placements] == [(), (1, 2), (3, 4)]
    assert {placement.gpu_layers for placement in placements} == {7}
    for wrong in ("5", "x", "4-3", "", "٣"):
        with pytest.raises(UsageError, match="blocks"):
            expert_placements(FACTS, [wrong])


def test_layers_are_whole_ones() -> None:
    assert [placement.gpu_layers for placement in layer_placements(FACTS, [0, 3, 7])] == [0, 3, 7]
    with pytest.raises(UsageError, match="has 7 with its output"):
        layer_placements(FACTS, [8])


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="this system has no /proc")  # noqa: PTH110
def test_counters_are_those_of_the_process() -> None:
    counters = sweeping._counters(os.getpid())
    assert set(counters) >= {"major_faults", "resident_bytes", "swapped_in_pages"}
    ballast = bytearray(os.urandom(1)) * (64 << 20)
    grown = sweeping._counters(os.getpid())
    assert grown["resident_bytes"] - counters["resident_bytes"] > len(ballast) * 0.9
    assert sweeping._counters(None) == {}
    assert sweeping._counters(1 << 30) == {}


def test_major_faults_are_read_past_a_name_with_blanks_and_brackets(tmp_path, monkeypatch) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a) b (c) S 1 2 3 4 5 6 77 8 99 10 11\n")
    (tmp_path / "7" / "status").write_text("Name:\ta\nVmRSS:\t 12 kB\nVmSwap:\t 3 kB\n")
    (tmp_path / "vmstat").write_text("pswpin 5\n")
    monkeypatch.setattr(sweeping, "PROC", tmp_path)
    assert sweeping._counters(7) == {
        "major_faults": 99,
        "resident_bytes": 12 * 1024,
        "swapped_bytes": 3 * 1024,
        "swapped_in_pages": 5,
    }


def test_a_sweep_is_shown_as_a_table_and_as_a_figure(tmp_path) -> None:
    rows = sweep(FakeMachine(broken="three").open, [ONE, TWO, THREE])
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(sweep_table(rows))
    console.print(published_table(PublishedTable("x", "a study", "", ({"label": "[/red]", "tokens_per_s": 3.0},))))
    text = console.export_text()
    assert "2.000 [2.000, 2.000]" in text
    assert "failed" in text
    assert "[/red]" in text
    figure_sweep(rows).savefig(tmp_path / "s.svg")
    assert (tmp_path / "s.svg").stat().st_size > 1000
    with pytest.raises(UsageError, match="nothing to draw"):
        figure_sweep(rows[2:])


def test_what_was_measured_is_handed_out_after_every_round_and_an_interval_once_there_can_be_one() -> None:
    kept: list[list[SweepRow]] = []
    last = sweep(FakeMachine(broken="three").open, [ONE, TWO, THREE], SweepSettings(rounds=7), on_round=kept.append)
    assert [len(rows[1].samples) for rows in kept] == [1, 2, 3, 4, 5, 6, 7]
    assert [rows[1].ratio is None for rows in kept] == [True] * 5 + [False] * 2
    assert all(rows[2].error == "out of memory" for rows in kept)
    assert kept[-1] == last


@dataclass
class Rates:
    """A loaded model that decodes at the next rate of its own list, and takes so much of the device."""

    rates: Iterator[float]
    device: int
    process_id: int | None = None

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (Buffer("GPU0", "model", self.device), Buffer("CPU", "model", 5))

    def decode_timing(self, *, tokens: int, prompt_tokens: int = 16) -> DecodeTiming:
        return DecodeTiming(tokens, tokens / next(self.rates))


def swept(**placements: tuple[int, list[float]]) -> list[SweepRow]:
    """Rows of placements under these names, each with its bytes of the device and its rates (the warm-up's too)."""
    loaded = {
        name: Rates(itertools.chain.from_iterable((rate, rate) for rate in rates), device)
        for name, (device, rates) in placements.items()
    }
    opened = [Placement(7, (number,), name) for number, name in enumerate(placements)]
    return sweep(lambda placement: contextlib.nullcontext(loaded[placement.name]), opened)


WAVERING = [90.0, 101.0, 99.0, 104.0, 95.0, 103.0]


def test_of_placements_that_are_equal_within_the_interval_the_smallest_is_chosen() -> None:
    rows = swept(slow=(10, [50.0] * 6), fast=(30, [100.0] * 6), smaller=(20, WAVERING))
    choice = Choice.of(rows)
    assert choice.chosen.title == "smaller"
    assert {row.title for row in (choice.fastest, *choice.equal)} == {"fast", "smaller"}
    assert "least of the device" in choice.describe() or "smallest" in choice.describe()


def test_a_placement_that_is_faster_than_all_others_is_chosen_whatever_it_takes() -> None:
    choice = Choice.of(swept(slow=(10, [50.0] * 6), fast=(30, WAVERING)))
    assert (choice.chosen.title, choice.equal) == ("fast", ())
    assert choice.describe() == "fast: the fastest, beyond the interval of any other"
    alone = Choice.of(sweep(FakeMachine(broken="one").open, [ONE, THREE]))
    assert alone.describe() == "three: no other placement ran"
    assert Choice.of(sweep(FakeMachine(broken="one").open, [ONE])) is None


def test_a_placement_is_measured_once_under_whatever_names_it_is_asked_for() -> None:
    asked = [*expert_placements(FACTS, ["0", "2", "1-2"]), *layer_placements(FACTS, [0, 7, 0])]
    kept, said = distinct(asked)
    assert [placement.name for placement in kept] == [
        "all on the device",
        "experts of blocks 1-2 on the host",
        "0 of 7 layers on the device",
    ]
    assert said == [
        "'experts of blocks 1-2 on the host' was asked for twice and is measured once",
        "'7 of 7 layers on the device' is the same placement as 'all on the device' and is measured as that",
        "'0 of 7 layers on the device' was asked for twice and is measured once",
    ]


def test_the_parts_of_what_was_taken_add_up_and_are_shown() -> None:
    buffers = [Buffer("CPU", use, size) for use, size in (("model", 1), ("KV", 20), ("RS", 300), ("compute", 4000))]
    taken = Taken.by([*buffers, Buffer("CPU", "output", 50000)])
    assert (taken.weight_bytes, taken.cache_bytes, taken.compute_bytes) == (1, 320, 54000)
    assert taken.total_bytes == 54321
    row = sweep(FakeMachine().open, [ONE])[0]
    assert row.host == Taken(weight_bytes=5, compute_bytes=1)
    assert row.to_dict()["host_weight_bytes"] == 5


def on_screen(*tables: RenderableType, width: int) -> str:
    out = Console(width=width, record=True, file=io.StringIO())
    for table in tables:
        out.print(table)
    return out.export_text()


def test_a_row_is_one_line_on_a_terminal_of_80_columns() -> None:
    named = [replace(ONE, name="experts of blocks 0-12 on the host"), replace(TWO, name="all on the device")]
    rows = sweep(FakeMachine().open, named)
    text = on_screen(sweep_table(rows), memory_table(rows), width=80)
    assert len([line for line in text.splitlines() if line.startswith("experts of blocks 0-12 on the host ")]) == 2
    assert "…" not in text


def test_the_numbers_of_a_published_column_have_the_same_decimals_and_the_title_is_one_line() -> None:
    rows = ({"label": "a", "tokens_per_s": 4.4}, {"label": "b", "tokens_per_s": 5.67})
    text = on_screen(published_table(PublishedTable("x", "a study of some length", "a laptop", rows)), width=80)
    title, heading, *lines = (" ".join(line.split()) for line in text.splitlines())
    assert title == "published: a study of some length (a laptop)"
    assert heading == "tokens/s"
    assert lines == ["a 4.40", "b 5.67"]


def test_a_figure_of_placements_without_a_device_shows_memory_of_the_host() -> None:
    rows = swept(one=(0, [50.0] * 6), two=(0, [60.0] * 6))
    assert figure_sweep(rows).axes[0].get_xlabel() == "memory used on the host, MiB"
    assert figure_sweep(swept(one=(9, [50.0] * 6))).axes[0].get_xlabel() == "memory used on the device, MiB"
