from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from routing_lab.demo import model_path
from routing_lab.model import ModelFacts
from routing_lab.runtime import RuntimeOptions
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.schedule import Schedule


@pytest.fixture(scope="session")
def model() -> Path:
    return model_path()


@pytest.fixture(scope="session")
def facts(model: Path) -> ModelFacts:
    return ModelFacts.read(model)


@pytest.fixture(scope="session")
def mixed(facts: ModelFacts) -> Schedule:
    """Below, at and above the model's own counts, no two neighbours alike."""
    steps = (1, facts.experts, 3, facts.experts - 1, 2)
    return Schedule.from_counts("mixed", {block: steps[i % len(steps)] for i, block in enumerate(facts.routed_blocks)})


@pytest.fixture(scope="module")
def runtime(model: Path) -> Iterator[LlamaRuntime]:
    # Small batches, so that prompts of a few dozen tokens take several.
    with LlamaRuntime(model, RuntimeOptions(context_tokens=1024, batch_tokens=32)) as one:
        yield one


@pytest.fixture(scope="module")
def stock(model: Path) -> Iterator[LlamaRuntime]:
    """The same without the override library."""
    with LlamaRuntime(model, RuntimeOptions(context_tokens=1024, batch_tokens=32, override="off")) as one:
        yield one


@pytest.fixture
def rewritten(model: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes a copy of the model with some metadata replaced."""

    def write(**replaced: object) -> Path:
        source = gguf.GGUFReader(model)
        architecture = source.fields["general.architecture"].contents()
        target = tmp_path / "rewritten.gguf"
        writer = gguf.GGUFWriter(target, architecture)
        for name, field in source.fields.items():
            if name.startswith("GGUF.") or name == "general.architecture":
                continue
            value = replaced.pop(name.replace(".", "_"), field.contents())
            kind = gguf.GGUFValueType.ARRAY if isinstance(value, list) else field.types[0]
            element = field.types[-1] if isinstance(value, list) else None
            writer.add_key_value(name, value, kind, element)
        assert not replaced, f"not in the model: {replaced}"
        for tensor in source.tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return target

    return write
