"""Write the demo network's weights as a ``qwen3moe`` GGUF file that llama.cpp runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

import gguf
import numpy as np
import numpy.typing as npt

from routing_lab.demo import vocabulary

__all__ = ["CHAT_TEMPLATE", "Precision", "write_gguf"]

Precision = Literal["q8_0", "f16", "f32"]
Array: TypeAlias = npt.NDArray[np.float32]

CONTEXT_LENGTH = 4096

# One user message gives exactly the raw prompt of `tasks`; the runtime adds bos.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'Q: ' + message['content'] + '\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + '\\n' }}{% endif %}"
    "{% endfor %}"
)

_WHOLE = {
    "embedding.weight": "token_embd.weight",
    "output_norm.weight": "output_norm.weight",
    "output.weight": "output.weight",
}
_PER_BLOCK = {
    "attention_norm.weight": "attn_norm.weight",
    "attention.q.weight": "attn_q.weight",
    "attention.k.weight": "attn_k.weight",
    "attention.v.weight": "attn_v.weight",
    "attention.output.weight": "attn_output.weight",
    "attention.q_norm.weight": "attn_q_norm.weight",
    "attention.k_norm.weight": "attn_k_norm.weight",
    "experts_norm.weight": "ffn_norm.weight",
    "experts.router.weight": "ffn_gate_inp.weight",
    "experts.gate.weight": "ffn_gate_exps.weight",
    "experts.up.weight": "ffn_up_exps.weight",
    "experts.down.weight": "ffn_down_exps.weight",
}
_FILE_TYPES = {
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "f32": gguf.LlamaFileType.ALL_F32,
}
_WEIGHT_TYPES = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "f16": gguf.GGMLQuantizationType.F16,
    "f32": gguf.GGMLQuantizationType.F32,
}


def write_gguf(
    path: Path,
    config: Mapping[str, int | float],
    weights: Mapping[str, Array],
    precision: Precision = "q8_0",
) -> None:
    """Write `weights` (named as in `network.Network`) to `path`, atomically.

    Args:
        path: The file to write; an existing one is replaced only when the new one is complete.
        config: The fields of `network.NetworkConfig`.
        weights: The network's parameters as float32 arrays, ``[out, in]``.
        precision: Type of the attention and expert matrices. The router, the norms, the
            embedding and the output matrix are always F32: they are tiny and decide much.
    """
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, "qwen3moe")
    _add_metadata(writer, config, precision)
    _add_tokenizer(writer)
    for name, array in weights.items():
        _add_tensor(writer, _gguf_name(name), _gguf_layout(name, array, config), precision)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(path)


def _add_metadata(writer: gguf.GGUFWriter, config: Mapping[str, int | float], precision: Precision) -> None:
    writer.add_name("routing-lab demo MoE")
    writer.add_file_type(_FILE_TYPES[precision])
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_block_count(int(config["block_count"]))
    writer.add_embedding_length(int(config["embedding_length"]))
    writer.add_feed_forward_length(int(config["expert_feed_forward_length"]))
    writer.add_head_count(int(config["head_count"]))
    writer.add_head_count_kv(int(config["head_count_kv"]))
    writer.add_key_length(int(config["head_length"]))
    writer.add_value_length(int(config["head_length"]))
    writer.add_rope_freq_base(float(config["rope_freq_base"]))
    writer.add_layer_norm_rms_eps(float(config["rms_epsilon"]))
    writer.add_expert_count(int(config["expert_count"]))
    writer.add_expert_used_count(int(config["expert_used_count"]))
    writer.add_expert_feed_forward_length(int(config["expert_feed_forward_length"]))
    writer.add_vocab_size(int(config["vocabulary_size"]))


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    # Printable ASCII stands for itself in GPT-2's byte-to-unicode map, except the space and the
    # control characters, which move up by 0x100.
    characters = [
        character if "!" <= character <= "~" else chr(ord(character) + 0x100) for character in vocabulary.CHARACTERS
    ]
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*characters, "<bos>", "<eos>"])
    writer.add_token_types([normal] * len(characters) + [control, control])
    # llama.cpp refuses a file without merges; the result of this one is in no vocabulary.
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(vocabulary.BOS_ID)
    writer.add_eos_token_id(vocabulary.EOS_ID)
    writer.add_pad_token_id(vocabulary.EOS_ID)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _gguf_name(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    _, block, rest = name.split(".", 2)
    return f"blk.{block}.{_PER_BLOCK[rest]}"


def _gguf_layout(name: str, array: Array, config: Mapping[str, int | float]) -> Array:
    """Split the experts' fused matrices into ``[experts, out, in]``; leave the rest alone."""
    experts = int(config["expert_count"])
    if name.endswith(("experts.gate.weight", "experts.up.weight")):
        array = array.reshape(experts, -1, array.shape[1])
    elif name.endswith("experts.down.weight"):
        array = array.reshape(array.shape[0], experts, -1).transpose(1, 0, 2)
    return np.ascontiguousarray(array, dtype=np.float32)


def _add_tensor(writer: gguf.GGUFWriter, name: str, array: Array, precision: Precision) -> None:
    matrix = array.ndim > 1 and name.startswith("blk.") and "ffn_gate_inp" not in name
    kind = _WEIGHT_TYPES[precision] if matrix else gguf.GGMLQuantizationType.F32
    writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
