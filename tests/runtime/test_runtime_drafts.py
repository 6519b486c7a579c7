"""Drafts where memory is scarce: fewer sequences at once, and the same words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from routing_lab.runtime.native import override_library, plain_kernels_library

# In a process of its own, as the engine always is: libraries in front of libllama come before it or not at all.
PROGRAM = """
import json, sys
from routing_lab.errors import RuntimeUnsupportedError
from routing_lab.runtime.engine import Engine, LoadSpec

class Scarce(Engine):
    asked = []

    def new_context(self, tokens, *, sequences=1, witness=None):
        self.asked.append(sequences)
        if sequences > int(sys.argv[4]):
            raise RuntimeUnsupportedError("no memory")
        return super().new_context(tokens, sequences=sequences, witness=witness)

model, override, plain = sys.argv[1:4]
engine = Scarce(LoadSpec(model=model, architecture="qwen3moe", override_library=override, plain_library=plain, threads=1,
                         context_tokens=256, batch_tokens=512, kv_type="f16", gpu_layers=0))
prompts = [f"Q: {a}+{3 * a}=?\\n" for a in range(11, 24)]
engine.switch(experts="0-5:8", uniform=None)
drafts = [{"prompt": prompt, "max_tokens": 40,
           "tokens": engine.generate(prompt=prompt, max_tokens=40, stop=[], margins=False)["token_ids"]} for prompt in prompts]
engine.switch(experts="0-5:2", uniform=None)
decoded = [engine.generate(prompt=prompt, max_tokens=40, stop=[], margins=False)["text"] for prompt in prompts]
Scarce.asked.clear()
checked = [[one["generation"]["text"] for one in engine.verify(drafts=drafts, stop=[], tie_margin=0.0)]]
first = list(Scarce.asked)
engine.switch(experts="0-5:3", uniform=None)
engine.switch(experts="0-5:2", uniform=None)
Scarce.asked.clear()
checked.append([one["generation"]["text"] for one in engine.verify(drafts=drafts, stop=[], tie_margin=0.0)])
print(json.dumps({"decoded": decoded, "checked": checked, "first": first, "second": Scarce.asked}))
"""


@pytest.mark.model
@pytest.mark.parametrize(("room", "asked"), [(8, [8]), (2, [8, 4, 2]), (1, [8, 4, 2, 1])])
def test_a_device_without_room_for_eight_caches_checks_fewer_at_once(model: Path, room: int, asked: list[int]) -> None:
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        str(model),
        str(override_library()),
        str(plain_kernels_library()),
        str(room),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    seen = json.loads(done.stdout)
    assert seen["checked"] == [seen["decoded"]] * 2
    assert seen["first"] == asked
    assert seen["second"] == [room], "what there is room for is found out once"
