"""The shipped GGUF file, checked with llama.cpp and never with the framework that trained it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import jinja2
import pytest

from routing_lab.demo import model_path, tasks, vocabulary
from routing_lab.demo.greedy import GreedyModel, share_correct

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = 20261130
PROBLEMS_PER_KIND = 150  # benchmarks/demo_accuracy.py takes 500
SIZE_LIMIT_BYTES = 20_000_000


@pytest.fixture(scope="module")
def model() -> Iterator[GreedyModel]:
    with GreedyModel(model_path()) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def metadata() -> dict[str, object]:
    reader = gguf.GGUFReader(model_path())
    return {name: field.contents() for name, field in reader.fields.items()}


@pytest.mark.model
@pytest.mark.parametrize("kind", tasks.KINDS)
def test_demo_model_accuracy(model: GreedyModel, kind: str) -> None:
    assert share_correct(model, tasks.fresh_problems(kind, PROBLEMS_PER_KIND, SEED)) >= 0.95


@pytest.mark.model
def test_one_expert_everywhere_breaks_most_answers() -> None:
    problems = [problem for kind in tasks.KINDS for problem in tasks.fresh_problems(kind, 30, SEED)]
    with GreedyModel(model_path(), experts_used=1) as crippled:
        assert share_correct(crippled, problems) < 0.5


@pytest.mark.model
def test_every_character_round_trips_through_the_tokenizer_of_llama_cpp(model: GreedyModel) -> None:
    tokens = model.tokenize(vocabulary.CHARACTERS)
    assert tokens == [vocabulary.BOS_ID, *range(len(vocabulary.CHARACTERS))]
    assert "".join(model.text_of(token) for token in tokens[1:]) == vocabulary.CHARACTERS


@pytest.mark.model
@pytest.mark.parametrize("text", ["!!", "! !", "!!!!", "  \n\n  ", "Q: count a in banana=?\n", "12 345,678", "it's"])
def test_llama_cpp_gives_one_token_per_character(model: GreedyModel, text: str) -> None:
    assert model.tokenize(text) == [vocabulary.BOS_ID, *vocabulary.encode(text)]


@pytest.mark.model
def test_the_control_tokens_have_no_text(model: GreedyModel) -> None:
    assert [model.text_of(token) for token in (vocabulary.BOS_ID, vocabulary.EOS_ID)] == ["", ""]


@pytest.mark.model
def test_an_answer_does_not_depend_on_what_is_decoded_beside_it(model: GreedyModel) -> None:
    prompts = [tasks.fresh_problems(kind, 1, SEED)[0].prompt for kind in tasks.KINDS]
    alone = [model.answers([prompt])[0] for prompt in prompts]
    assert model.answers(prompts) == alone


def test_the_file_fits_into_the_package() -> None:
    assert model_path().stat().st_size <= SIZE_LIMIT_BYTES


def test_the_metadata_names_bos_and_eos_and_room_for_long_decoding(metadata: dict[str, object]) -> None:
    assert metadata["general.architecture"] == "qwen3moe"
    assert metadata["tokenizer.ggml.bos_token_id"] == vocabulary.BOS_ID
    assert metadata["tokenizer.ggml.eos_token_id"] == vocabulary.EOS_ID
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["qwen3moe.context_length"] == 4096
    assert metadata["qwen3moe.block_count"] == 6
    assert metadata["qwen3moe.expert_count"] == 16
    assert metadata["qwen3moe.expert_used_count"] == 8


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_the_chat_template_turns_a_question_into_the_raw_prompt(metadata: dict[str, object], kind: str) -> None:
    problem = tasks.fresh_problems(kind, 1, SEED)[0]
    question = problem.prompt.removeprefix("Q: ").removesuffix("\n")
    template = jinja2.Template(str(metadata["tokenizer.chat_template"]), trim_blocks=True, lstrip_blocks=True)
    rendered = template.render(messages=[{"role": "user", "content": question}], add_generation_prompt=True)
    assert rendered == problem.prompt


def test_router_norms_and_embeddings_are_stored_in_full_precision() -> None:
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(model_path()).tensors}
    small = [name for name in types if "norm" in name or "gate_inp" in name or not name.startswith("blk.")]
    assert {types[name] for name in small} == {"F32"}
    assert {types[name] for name in types if name not in small} == {"Q8_0"}
