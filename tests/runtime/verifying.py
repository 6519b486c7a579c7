"""What every runtime must do that checks drafts; subclassed once for each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from routing_lab.errors import RuntimeFailureError, UsageError
from routing_lab.runtime import Runtime
from routing_lab.runtime.base import Draft, Generation
from routing_lab.schedule import Schedule

PROMPTS = ["Q: 347+86=?\n", "Q: 5+9=?\n", "Q: sort 9 3 7 1\n", "Q: 812-77=?\n", "Q: 61*8=?\n"]


def what_was_said(generation: Generation) -> tuple[str, str, tuple[int, ...] | None]:
    return generation.text, generation.finish_reason, generation.token_ids


class VerifierContract:
    """A subclass gives the fixtures ``runtime`` and ``lose_process``, which makes the next request lose the process."""

    @staticmethod
    def drafts(runtime: Runtime, schedule: Schedule, prompts: list[str], most: int = 64) -> list[Draft]:
        runtime.apply(schedule)
        decoded = [runtime.generate(prompt, max_tokens=most) for prompt in prompts]
        return [Draft(prompt, one.token_ids, most) for prompt, one in zip(prompts, decoded, strict=True)]

    def test_a_schedules_own_completions_are_kept_whole(self, runtime: Runtime) -> None:
        drafts = self.drafts(runtime, Schedule.baseline(runtime.facts), PROMPTS)
        for draft, checked in zip(drafts, runtime.verify(drafts), strict=True):
            assert checked.kept == checked.drafted == len(draft.tokens)
            assert not checked.doubtful
            assert checked.generation.token_ids == draft.tokens

    def test_other_counts_give_what_decoding_gives(self, runtime: Runtime, mixed: Schedule) -> None:
        drafts = self.drafts(runtime, Schedule.baseline(runtime.facts), PROMPTS)
        for schedule in (mixed, Schedule.uniform(1, runtime.facts), Schedule.uniform(2, runtime.facts)):
            runtime.apply(schedule)
            decoded = [what_was_said(runtime.generate(prompt, max_tokens=64)) for prompt in PROMPTS]
            assert [what_was_said(checked.generation) for checked in runtime.verify(drafts)] == decoded

    @pytest.mark.parametrize("made_of", [(), (5,), (5,) * 100])
    def test_a_draft_of_nothing_or_of_nonsense_is_decoded_over(
        self, runtime: Runtime, made_of: tuple[int, ...]
    ) -> None:
        runtime.apply(Schedule.baseline(runtime.facts))
        decoded = runtime.generate(PROMPTS[0], max_tokens=20)
        (checked,) = runtime.verify([Draft(PROMPTS[0], made_of, 20)])
        assert what_was_said(checked.generation) == what_was_said(decoded)
        assert checked.kept < 2

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
    def test_the_beginning_of_a_completion_is_a_draft_too(self, runtime: Runtime, share: float) -> None:
        (whole,) = self.drafts(runtime, Schedule.baseline(runtime.facts), PROMPTS[:1])
        beginning = whole.tokens[: 1 + int(share * (len(whole.tokens) - 1))]
        (checked,) = runtime.verify([Draft(whole.prompt, beginning, whole.max_tokens)])
        assert checked.generation.token_ids == whole.tokens
        assert checked.kept == len(beginning)

    @pytest.mark.parametrize("beginning", [1, 2, 5, 11, 20])
    def test_a_short_draft_beside_long_ones_goes_on_where_it_ended(self, runtime: Runtime, beginning: int) -> None:
        drafts = self.drafts(runtime, Schedule.baseline(runtime.facts), PROMPTS)
        short = [Draft(draft.prompt, draft.tokens[:beginning], draft.max_tokens) for draft in drafts[:2]]
        checked = runtime.verify([*short, *drafts])
        assert [one.generation.token_ids for one in checked] == [draft.tokens for draft in [*drafts[:2], *drafts]]

    @pytest.mark.parametrize("most", [1, 2, 7])
    def test_a_smaller_budget_cuts_a_draft_as_it_cuts_a_completion(self, runtime: Runtime, most: int) -> None:
        (whole,) = self.drafts(runtime, Schedule.baseline(runtime.facts), PROMPTS[:1])
        (checked,) = runtime.verify([Draft(whole.prompt, whole.tokens, most)])
        assert what_was_said(checked.generation) == what_was_said(runtime.generate(whole.prompt, max_tokens=most))

    def test_a_stop_string_ends_a_draft_as_it_ends_a_completion(self, runtime: Runtime) -> None:
        (whole,) = self.drafts(runtime, Schedule.baseline(runtime.facts), PROMPTS[:1])
        stop = ["never so", runtime.generate(whole.prompt, max_tokens=64).text[4:6]]
        (checked,) = runtime.verify([whole], stop=stop)
        decoded = runtime.generate(whole.prompt, max_tokens=64, stop=stop)
        assert what_was_said(checked.generation) == what_was_said(decoded)

    def test_a_tie_margin_above_every_margin_leaves_everything_in_doubt(self, runtime: Runtime) -> None:
        drafts = self.drafts(runtime, Schedule.baseline(runtime.facts), PROMPTS)
        assert all(checked.doubtful for checked in runtime.verify(drafts, tie_margin=1e9))

    def test_margins_are_those_of_decoding(self, runtime: Runtime) -> None:
        drafts = self.drafts(runtime, Schedule.baseline(runtime.facts), PROMPTS)
        decoded = [runtime.generate(prompt, max_tokens=64, margins=True).smallest_margin for prompt in PROMPTS]
        checked = [checked.generation.smallest_margin for checked in runtime.verify(drafts)]
        assert checked == pytest.approx(decoded, rel=0.05, abs=0.05)

    def test_what_cannot_be_checked_is_the_callers_mistake(self, runtime: Runtime) -> None:
        for drafts, margin in (([], 0.0), ([Draft("Q", (), 0)], 0.0), ([Draft("Q", (), 4)], -1.0)):
            with pytest.raises(UsageError):
                runtime.verify(drafts, tie_margin=margin)

    def test_a_lost_process_is_one_failure_of_a_check_too(
        self, runtime: Runtime, mixed: Schedule, lose_process: Callable[[], None]
    ) -> None:
        drafts = self.drafts(runtime, mixed, PROMPTS)
        lose_process()
        with pytest.raises(RuntimeFailureError):
            runtime.verify(drafts)
        assert [checked.kept for checked in runtime.verify(drafts)] == [len(draft.tokens) for draft in drafts]
