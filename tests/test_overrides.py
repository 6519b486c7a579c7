"""Override syntax: every form there and back, and the cases in which llama.cpp would do something else than it shows."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from modelfiles import counts_for, make_facts, moe_facts

from routing_lab.errors import RuntimeUnsupportedError, UserFileError
from routing_lab.overrides import (
    EXPERTS_ENV,
    KvOverride,
    ServerCommand,
    argument_overrides,
    experts_setting,
    merge_override_kv,
    override_kv,
    parse_argument_overrides,
    parse_experts,
    parse_experts_setting,
    parse_override_kv,
    parse_server_command,
    preload_environment,
    render_experts,
    render_override_kv,
    server_command,
    stock_override,
)
from routing_lab.placement import Placement
from routing_lab.schedule import Schedule, format_counts

FACTS = make_facts(dict.fromkeys(range(6), 8))
MIXED = Schedule.from_counts("mixed", {0: 4, 1: 4, 5: 2})
LIBRARY = Path("/opt/lib/expert_override.so")

visible = st.characters(codec="utf-8", exclude_characters="\0")
keys = st.text(visible, min_size=1, max_size=30).filter(lambda key: "=" not in key and not key.startswith('"'))
overrides = st.one_of(
    st.builds(KvOverride, keys, st.just("int"), st.integers(-(10**18) + 1, 10**18 - 1).map(str)),
    st.builds(KvOverride, keys, st.just("float"), st.floats(0, 1e15).map(lambda number: f"{number:.6g}")),
    st.builds(KvOverride, keys, st.just("bool"), st.sampled_from(["true", "false"])),
    st.builds(KvOverride, keys, st.just("str"), st.text(visible, max_size=30)),
)
# What a person may add to a server's command line.
words = st.text(st.characters(codec="utf-8", exclude_categories=("C",)), min_size=1, max_size=12)


def same(one: Schedule, two: Schedule, facts=FACTS) -> bool:
    return one.key(facts) == two.key(facts)


# ---------------------------------------------------------------------------------------------------------------------
# The preload form


@given(st.data())
def test_counts_survive_the_round_trip_through_the_environment(data) -> None:
    facts = data.draw(moe_facts())
    schedule = Schedule.from_counts("s", data.draw(counts_for(facts)))
    assert parse_experts(render_experts(schedule, facts)) == schedule.resolve(facts)
    assert parse_experts_setting(experts_setting(schedule, facts)) == schedule.resolve(facts)
    assert shlex.split(experts_setting(schedule, facts)) == [f"{EXPERTS_ENV}={schedule.key(facts)}"]


def test_the_setting_is_what_the_documentation_shows() -> None:
    assert experts_setting(MIXED, FACTS) == 'ROUTING_LAB_EXPERTS="0-1:4,2-4:8,5:2"'


def test_no_counts_are_an_empty_text() -> None:
    assert parse_experts("") == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-6", "is no entry"),
        ("0-6:", "is no entry"),
        ("0:6,", "is no entry"),
        (" 0:6", "is no entry"),
        ("0:-6", "is no entry"),
        ("0:٦", "is no entry"),
        ("6-0:6", "impossible"),
        ("0-99999999:6", "impossible"),
        ("0:0", "0 experts"),
        ("0-6:6,6:5", "block 6 is given twice"),
    ],
)
def test_what_the_library_would_refuse_is_refused_here(text, expected) -> None:
    with pytest.raises(ValueError, match=expected):
        parse_experts(text)


@pytest.mark.parametrize("text", ["", "OTHER=0:6", "ROUTING_LAB_EXPERTS", '"0:6"', 'ROUTING_LAB_EXPERTS="0:6'])
def test_what_sets_no_counts_is_refused(text) -> None:
    with pytest.raises(ValueError):
        parse_experts_setting(text)


@pytest.mark.parametrize("path", ["/a b/x.so", "/a:b/x.so"])
def test_a_library_that_ld_preload_cannot_name_is_refused(path) -> None:
    with pytest.raises(ValueError, match="LD_PRELOAD cannot name"):
        preload_environment(MIXED, FACTS, Path(path))


def test_a_schedule_that_does_not_fit_gives_no_override() -> None:
    with pytest.raises(UserFileError):
        render_experts(Schedule.from_counts("s", {9: 1}), FACTS)


# ---------------------------------------------------------------------------------------------------------------------
# The stock form


@given(st.data())
def test_a_uniform_schedule_survives_the_round_trip_through_the_stock_form(data) -> None:
    facts = data.draw(moe_facts())
    count = data.draw(st.integers(1, facts.experts))
    (parsed,) = parse_override_kv(override_kv(Schedule.uniform(count, facts), facts))
    assert parsed == KvOverride("qwen3moe.expert_used_count", "int", str(count))


def test_a_mixed_schedule_has_no_stock_form_and_the_message_says_why() -> None:
    with pytest.raises(RuntimeUnsupportedError, match=r"0-1:4,2-4:8,5:2.*no array type.*preload library"):
        stock_override(MIXED, FACTS)


@given(st.lists(overrides, max_size=5))
def test_overrides_survive_the_round_trip_through_one_argument(several) -> None:
    assume(several)
    assert parse_override_kv(render_override_kv(several)) == several


@given(st.lists(st.lists(overrides, min_size=1, max_size=3), max_size=3))
def test_merging_keeps_every_override_of_the_users_but_the_one_that_ours_replaces(groups) -> None:
    ours = stock_override(Schedule.uniform(3, FACTS), FACTS)
    rival = KvOverride(ours.key, "int", "7")
    arguments = [render_override_kv(group) for group in [*groups, [rival]]]
    merged = parse_override_kv(merge_override_kv(arguments, ours))
    theirs = [override for group in groups for override in group if override.key != ours.key]
    assert merged == [*theirs, ours]
    assert merge_override_kv([], None) == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a=int",
        "a=integer:3",
        "a=int:x",
        "a=int:",
        "a=float:nan",
        "a=bool:yes",
        "=int:3",
        "a=int:1,",
        "k" * 128 + "=int:1",
        "a=str:" + "x" * 128,
    ],
)
def test_an_override_that_llama_cpp_would_refuse_or_misread_is_refused(text) -> None:
    with pytest.raises(ValueError):
        parse_override_kv(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [('"a=str:x,y"', "x,y"), ('a=str:say "hi"', 'say "hi"'), ('"a=str:say ""hi"", you"', 'say "hi", you')],
)
def test_quoting_is_read_as_llama_cpp_reads_it(text, value) -> None:
    assert parse_override_kv(text) == [KvOverride("a", "str", value)]


# ---------------------------------------------------------------------------------------------------------------------
# The argument form


counts_of_any_size = st.dictionaries(st.integers(0, 4095), st.integers(1, 4096), min_size=1, max_size=300)


@given(counts_of_any_size, st.lists(overrides, max_size=3), st.randoms())
def test_counts_survive_the_round_trip_through_arguments_in_any_order(counts, others, random) -> None:
    ours = argument_overrides(format_counts(counts))
    text = render_override_kv(ours)
    assert not set(text) & set(",;#\" \\'") - ({","} if len(ours) > 1 else set()), "nothing that any form would quote"
    mixed = [*ours, *others]
    random.shuffle(mixed)
    assert parse_argument_overrides(parse_override_kv(render_override_kv(mixed))) == counts


def test_64_blocks_of_different_counts_take_four_values() -> None:
    parts = argument_overrides(format_counts({block: 100 + block for block in range(64)}))
    assert [part.key.rpartition(".")[2] for part in parts] == [f"{at}of4" for at in range(1, 5)]
    assert all(len(part.value) <= 127 for part in parts)


def test_the_argument_is_what_the_documentation_shows() -> None:
    (part,) = argument_overrides("0-6:6,7-32:5")
    assert str(part) == "routing_lab.experts_used=str:0-6:6/7-32:5"


def test_the_models_own_counts_are_said_in_a_word() -> None:
    (own,) = argument_overrides("")
    assert str(own) == "routing_lab.experts_used=str:own"
    assert parse_argument_overrides([own]) == {}
    assert parse_argument_overrides([KvOverride("a", "str", "0:1")]) is None


BAD_ARGUMENTS = {
    "routing_lab.experts_used=str:": "part.* is empty",
    "routing_lab.experts_used=str:0:0": "0 experts",
    "routing_lab.experts_used=str:0-6": "is no entry|':' is expected",
    "routing_lab.experts_used=str:0:6/own": "is no entry|a number is expected",
    "routing_lab.experts_used=int:6": "must be of type str",
    "routing_lab.expert_used=str:0:6": "is no key",
    "routing_lab.experts_used.=str:0:6": "is no key|a number is expected",
    "routing_lab.experts_used.0of1=str:0:6": "is no key",
    "routing_lab.experts_used.2of1=str:0:6": "is no key",
    "routing_lab.experts_used.1of2x=str:0:6": "is no key",
    "routing_lab.experts_used.1of2=str:0:6": "has 1 of its 2 parts",
    "routing_lab.experts_used.1of2=str:0:6,routing_lab.experts_used.1of2=str:1:6": "given twice",
    "routing_lab.experts_used.1of2=str:0:6,routing_lab.experts_used.2of3=str:1:6": "given twice",
    "routing_lab.experts_used=str:0:6,routing_lab.experts_used=str:0:6": "given twice",
    "routing_lab.experts_used.1of2=str:0:6,routing_lab.experts_used.2of2=str:0:5": "block 0 is given twice",
}


@pytest.mark.parametrize(("text", "problem"), BAD_ARGUMENTS.items())
def test_an_argument_that_the_library_would_refuse_is_refused_here(text, problem) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_argument_overrides(parse_override_kv(text))


# ---------------------------------------------------------------------------------------------------------------------
# The whole command line


@given(st.data())
def test_a_preloaded_command_line_runs_the_schedule_it_was_made_for(data) -> None:
    facts = data.draw(moe_facts())
    schedule = Schedule.from_counts("s", data.draw(counts_for(facts)))
    placement = Placement(
        data.draw(st.integers(0, 99)), tuple(data.draw(st.sets(st.sampled_from(facts.blocks_with_experts))))
    )
    model = Path("/models") / data.draw(words.filter(lambda word: "/" not in word and word not in {".", ".."}))
    extra = data.draw(st.lists(words, max_size=3))
    command = server_command(model, schedule, facts, library=LIBRARY, placement=placement, extra=extra)
    assert same(parse_server_command(command.shell(), facts), schedule, facts)
    assert shlex.split(command.shell()) == ["env", *(f"{k}={v}" for k, v in command.env.items()), *command.argv]


@given(st.data())
def test_a_stock_command_line_runs_the_uniform_schedule_it_was_made_for(data) -> None:
    facts = data.draw(moe_facts())
    schedule = Schedule.uniform(data.draw(st.integers(1, facts.experts)), facts)
    users = [render_override_kv(data.draw(st.lists(overrides, min_size=1, max_size=2)))]
    command = server_command(Path("m.gguf"), schedule, facts, library=None, kv_overrides=users)
    assert command.argv.count("--override-kv") == 1
    assert same(parse_server_command(command.shell(), facts), schedule, facts)
    assert command.env == {}


def test_the_command_line_is_explicit_about_everything_that_llama_server_would_choose() -> None:
    command = server_command(
        Path("/m/a model.gguf"),
        MIXED,
        FACTS,
        library=LIBRARY,
        placement=Placement(99, (3, 4, 5)),
        context_tokens=8192,
        threads=6,
        extra=["--alias", "demo"],
    )
    assert command.shell() == (
        "env LD_PRELOAD=/opt/lib/expert_override.so ROUTING_LAB_EXPERTS=0-1:4,2-4:8,5:2 "
        "llama-server --model '/m/a model.gguf' --ctx-size 8192 --parallel 1 --n-gpu-layers 99 "
        r"--override-tensor 'blk\.(3|4|5)\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU' --fit off "
        "--threads 6 --host 127.0.0.1 --port 8080 --alias demo"
    )


def test_a_users_own_overrides_end_up_in_the_one_argument_that_counts() -> None:
    command = server_command(
        Path("m.gguf"),
        Schedule.uniform(4, FACTS),
        FACTS,
        library=None,
        kv_overrides=["a=int:1"],
        extra=["--override-kv", "b=bool:true,qwen3moe.expert_used_count=int:2", "--verbose"],
    )
    position = command.argv.index("--override-kv")
    assert command.argv[position + 1 :] == ("a=int:1,b=bool:true,qwen3moe.expert_used_count=int:4", "--verbose")


def test_a_mixed_schedule_without_the_library_is_refused() -> None:
    with pytest.raises(RuntimeUnsupportedError, match="no stock form"):
        server_command(Path("m.gguf"), MIXED, FACTS, library=None)


def test_a_placement_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UserFileError, match="blocks without routed experts: 9"):
        server_command(Path("m.gguf"), MIXED, FACTS, library=LIBRARY, placement=Placement(9, (9,)))


def test_a_shell_passes_the_line_on_word_for_word() -> None:
    command = ServerCommand({"A": "1 2", "B": "$HOME"}, ("sh", "-c", 'printf "%s|%s|%s" "$A" "$B" "$0"', "it's"))
    done = subprocess.run(["/bin/sh", "-c", command.shell()], capture_output=True, text=True, check=True)
    assert done.stdout == "1 2|$HOME|it's"


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("llama-server -m x", "0-5:8"),
        ("LD_PRELOAD=/x.so ROUTING_LAB_EXPERTS=0-5:2 llama-server", "0-5:2"),
        ("llama-server --override-kv qwen3moe.expert_used_count=int:3 --override-kv a=int:1", "0-5:3"),
        (
            "llama-server --override-kv qwen3moe.expert_used_count=int:3 --override-kv qwen3moe.expert_used_count=int:4",
            "0-5:3",
        ),
        ("llama-server --override-kv a=int:1 --override-kv qwen3moe.expert_used_count=int:3", "0-5:3"),
        ("llama-server --override-kv llama.expert_used_count=int:3", "0-5:8"),
        ("LD_PRELOAD=/x.so llama-server --override-kv routing_lab.experts_used=str:0:4/2-5:2", "0:4,1:8,2-5:2"),
        ("LD_PRELOAD=/x.so llama-server --override-kv routing_lab.experts_used=str:own", "0-5:8"),
        (
            "LD_PRELOAD=/x.so llama-server --override-kv routing_lab.experts_used=str:0-5:2 --override-kv a=int:1",
            "0-5:2",
        ),
        (
            "LD_PRELOAD=/x ROUTING_LAB_EXPERTS=0-2:2,3-5:2 llama-server --override-kv routing_lab.experts_used=str:0-5:2",
            "0-5:2",
        ),
        (
            "llama-server --override-kv qwen3moe.expert_used_count=int:3,qwen3moe.expert_used_count=int:4",
            "0-5:3",
        ),
    ],
)
def test_a_line_is_read_as_llama_server_reads_it(line, key) -> None:
    assert parse_server_command(line, FACTS).key(FACTS) == key


@pytest.mark.parametrize(
    "line",
    ["env ROUTING_LAB_EXPERTS=0-5:2 llama-server", "llama-server --override-kv routing_lab.experts_used=str:0-5:2"],
)
def test_counts_that_nothing_would_read_are_pointed_out(line) -> None:
    with pytest.raises(ValueError, match="LD_PRELOAD names no library"):
        parse_server_command(line, FACTS)


@pytest.mark.parametrize("argument", ["0-5:3", "own", "0-4:2"])
def test_a_contradiction_between_environment_and_command_line_is_pointed_out(argument) -> None:
    line = (
        f"LD_PRELOAD=/x.so ROUTING_LAB_EXPERTS=0-5:2 llama-server --override-kv routing_lab.experts_used=str:{argument}"
    )
    with pytest.raises(ValueError, match="contradict each other"):
        parse_server_command(line, FACTS)
