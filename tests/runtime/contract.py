"""What every runtime must do; subclassed once for each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from routing_lab.errors import RuntimeFailureError, UsageError, UserFileError
from routing_lab.runtime import Runtime
from routing_lab.schedule import Schedule

PROMPT = "Q: 347+86=?\n"


class RuntimeContract:
    """A subclass gives the fixtures ``runtime`` and ``lose_process``, which makes the next request lose the process."""

    def test_apply_reads_back_every_routed_block(self, runtime: Runtime, mixed: Schedule) -> None:
        attestation = runtime.apply(mixed)
        wanted = mixed.resolve(runtime.facts)
        assert dict(attestation.selected) == wanted
        assert dict(attestation.summed) == wanted

    def test_blocks_that_a_schedule_does_not_list_keep_the_models_own_count(self, runtime: Runtime) -> None:
        first, *others = runtime.facts.routed_blocks
        selected = runtime.apply(Schedule.from_counts("one", {first: 1})).selected
        assert selected[first] == 1
        assert all(selected[block] == runtime.facts.experts_used[block] for block in others)

    @pytest.mark.parametrize("count", [0, 10**6])
    def test_a_schedule_that_does_not_fit_is_refused_and_the_last_one_stays(self, runtime: Runtime, count: int) -> None:
        runtime.apply(Schedule.uniform(1, runtime.facts))
        before = runtime.generate(PROMPT, max_tokens=8)
        with pytest.raises((UserFileError, UsageError, ValueError)):
            runtime.apply(Schedule.from_counts("bad", {runtime.facts.routed_blocks[0]: count}))
        assert runtime.generate(PROMPT, max_tokens=8).text == before.text

    def test_greedy_text_is_repeatable_and_comes_back_after_a_switch(self, runtime: Runtime, mixed: Schedule) -> None:
        baseline = Schedule.baseline(runtime.facts)
        runtime.apply(baseline)
        first = runtime.generate(PROMPT, max_tokens=24)
        assert runtime.generate(PROMPT, max_tokens=24).text == first.text
        runtime.apply(mixed)
        runtime.generate(PROMPT, max_tokens=24)
        runtime.apply(baseline)
        assert runtime.generate(PROMPT, max_tokens=24).text == first.text

    def test_the_budget_ends_a_completion_with_length(self, runtime: Runtime) -> None:
        runtime.apply(Schedule.baseline(runtime.facts))
        cut = runtime.generate(PROMPT, max_tokens=2)
        assert cut.tokens == 2
        assert cut.finish_reason == "length"
        assert runtime.generate(PROMPT, max_tokens=3).text.startswith(cut.text)

    def test_a_stop_string_ends_a_completion_and_is_no_part_of_it(self, runtime: Runtime) -> None:
        runtime.apply(Schedule.baseline(runtime.facts))
        whole = runtime.generate(PROMPT, max_tokens=12).text
        stop = whole[4:6]
        stopped = runtime.generate(PROMPT, max_tokens=12, stop=["never so", stop])
        assert stopped.finish_reason == "stop"
        assert stopped.text == whole[: whole.index(stop)]

    def test_the_end_of_the_context_ends_a_completion_with_length(self, runtime: Runtime) -> None:
        runtime.apply(Schedule.baseline(runtime.facts))
        filler = "8" * (runtime.options.context_tokens - 40)
        near = runtime.generate(filler, max_tokens=10**6)
        assert near.finish_reason == "stop" or near.prompt_tokens + near.tokens == runtime.options.context_tokens

    def test_margins_are_measured_only_where_they_are_asked_for(self, runtime: Runtime) -> None:
        assert runtime.generate(PROMPT, max_tokens=4).smallest_margin is None
        margin = runtime.generate(PROMPT, max_tokens=4, margins=True).smallest_margin
        assert margin is not None
        assert margin >= 0

    def test_time_inside_the_library_is_a_part_of_the_whole(self, runtime: Runtime) -> None:
        generation = runtime.generate(PROMPT, max_tokens=16)
        assert 0 < generation.llama_seconds <= generation.seconds

    @pytest.mark.parametrize("ask", [{"max_tokens": 0}, {"max_tokens": 4, "stop": [""]}])
    def test_impossible_requests_are_the_callers_mistake(self, runtime: Runtime, ask: dict) -> None:
        with pytest.raises(UsageError):
            runtime.generate(PROMPT, **ask)

    def test_a_prompt_that_fills_the_context_is_the_callers_mistake(self, runtime: Runtime) -> None:
        with pytest.raises(UsageError):
            runtime.generate("7" * (2 * runtime.options.context_tokens), max_tokens=4)

    def test_decode_timing_times_the_tokens_asked_for(self, runtime: Runtime) -> None:
        timing = runtime.decode_timing(tokens=16, prompt_tokens=4)
        assert timing.tokens == 16
        assert timing.seconds > 0
        assert timing.tokens_per_s == pytest.approx(16 / timing.seconds)

    @pytest.mark.parametrize(("tokens", "prompt_tokens"), [(0, 4), (4, 0), (10**6, 4)])
    def test_timing_that_does_not_fit_is_the_callers_mistake(
        self, runtime: Runtime, tokens: int, prompt_tokens: int
    ) -> None:
        with pytest.raises(UsageError):
            runtime.decode_timing(tokens=tokens, prompt_tokens=prompt_tokens)

    def test_a_chat_prompt_holds_the_users_words(self, runtime: Runtime) -> None:
        for thinking in (None, True, False):
            assert "how much is 2+3" in runtime.render_chat("how much is 2+3", thinking=thinking)

    def test_a_lost_process_is_one_failure_and_the_schedule_comes_back(
        self, runtime: Runtime, mixed: Schedule, lose_process: Callable[[], None]
    ) -> None:
        runtime.apply(mixed)
        before = runtime.generate(PROMPT, max_tokens=16)
        lose_process()
        with pytest.raises(RuntimeFailureError):
            runtime.generate(PROMPT, max_tokens=16)
        assert runtime.generate(PROMPT, max_tokens=16).text == before.text

    def test_the_library_has_a_name(self, runtime: Runtime) -> None:
        assert runtime.build.name
        assert runtime.build.library_digest.startswith("sha256:")

    def test_closing_twice_is_fine(self, runtime: Runtime) -> None:
        runtime.close()
        runtime.close()
