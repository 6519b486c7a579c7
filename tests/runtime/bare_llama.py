"""A program that knows llama_cpp and nothing of routing_lab: ``bare_llama.py TASK MODEL ...`` prints JSON."""

from __future__ import annotations

import ctypes
import json
import os
import sys

OVERRIDE = ctypes.CDLL(sys.argv[3], mode=ctypes.RTLD_GLOBAL) if sys.argv[1] == "two-contexts" else None

import llama_cpp.llama_cpp as api  # noqa: E402 (libllama comes second)


def silent(_level: int, _text: bytes, _data: object) -> None: ...


SILENT = api.llama_log_callback(silent)
api.llama_log_set(SILENT, None)
api.llama_backend_init()
MODEL = api.llama_model_load_from_file(sys.argv[2].encode(), api.llama_model_default_params())
VOCAB = api.llama_model_get_vocab(MODEL)


def new_context(callback: object = None) -> int:
    params = api.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 256, 256, 256
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    if callback:
        params.cb_eval = callback
    return api.llama_init_from_model(MODEL, params)


def decode(context: int, text: str) -> str:
    """Logits after ``text``, as hex."""
    buffer = (api.llama_token * 200)()
    count = api.llama_tokenize(VOCAB, text.encode(), len(text.encode()), buffer, 200, True, True)
    api.llama_memory_clear(api.llama_get_memory(context), False)
    assert api.llama_decode(context, api.llama_batch_get_one(buffer, count)) == 0
    row = api.llama_get_logits_ith(context, -1)
    return ctypes.string_at(row, 4 * api.llama_vocab_n_tokens(VOCAB)).hex()


def set_experts(text: str) -> None:
    assert OVERRIDE is not None
    error = ctypes.create_string_buffer(500)
    assert OVERRIDE.routing_lab_set(text.encode(), error, 500) == 0, error.value


def logits(prompt: str) -> dict:
    return {"logits": decode(new_context(), prompt)}


def two_contexts(_library: str, prompt: str, *schedules: str) -> dict:
    contexts, first = [], []
    for schedule in schedules:
        set_experts(schedule)
        contexts.append(new_context())
        first.append(decode(contexts[-1], prompt))
    again = []
    for schedule, context in zip(schedules, contexts, strict=True):
        set_experts(schedule)
        decode(context, "7")  # another shape: the graph is built anew
        again.append(decode(context, prompt))
    return {"first": first, "again": again}


def warm_up() -> dict:
    counts: dict[bytes, int] = {}
    name, elements, rows = api._lib.ggml_get_name, api._lib.ggml_nelements, api._lib.ggml_nrows
    name.restype, elements.restype, rows.restype = ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64
    for function in (name, elements, rows):
        function.argtypes = [ctypes.c_void_p]

    def see(tensor: int, ask: bool, _data: object) -> bool:
        if ask and name(tensor).startswith(b"ffn_moe_topk-"):
            counts[name(tensor)] = elements(tensor) // rows(tensor)
        return False

    callback = api.ggml_backend_sched_eval_callback(see)
    context = new_context(callback)
    result = {}
    # Another shape afterwards: llama.cpp reuses the warm-up's graph for a batch of the same one, with or without us.
    for phase, warm, text in (("warm-up", True, "7"), ("after", False, "7+5")):
        counts.clear()
        api.llama_set_warmup(context, warm)
        decode(context, text)
        result[phase] = list(counts.values())
    return result


TASKS = {"logits": logits, "two-contexts": two_contexts, "warm-up": warm_up}
json.dump(TASKS[sys.argv[1]](*sys.argv[3:]), sys.stdout)
