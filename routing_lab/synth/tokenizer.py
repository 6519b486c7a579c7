"""A byte-level BPE vocabulary of any size that llama.cpp loads and tokenises with: a token for each byte, no merges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gguf import GGUFWriter

__all__ = ["CHAT_TEMPLATE", "FEWEST_TOKENS", "add_tokenizer"]

_BYTES: Final = 256
_MARKS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_END_OF_TEXT, _END_OF_TURN = _BYTES, _BYTES + 2

FEWEST_TOKENS: Final = _BYTES + len(_MARKS)

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def add_tokenizer(writer: GGUFWriter, vocabulary: int) -> None:
    """Add the vocabulary to the metadata.

    What lies beyond the bytes and the three marks is padding: text never becomes one of these tokens. They count as
    normal ones all the same, so that a timing that draws tokens reads embeddings from all over the matrix.
    """
    import gguf

    padding = vocabulary - FEWEST_TOKENS
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*_byte_characters(), *_MARKS, *(f"[PAD{index}]" for index in range(padding))])
    writer.add_token_types([normal] * _BYTES + [control] * len(_MARKS) + [normal] * padding)
    # llama.cpp refuses a file without merges; the result of this one is in no vocabulary.
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(_END_OF_TEXT)
    writer.add_eos_token_id(_END_OF_TURN)
    writer.add_pad_token_id(_END_OF_TEXT)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _byte_characters() -> list[str]:
    """The character that stands for each byte in GPT-2's vocabulary.

    Printable Latin-1 stands for itself; every other byte, in order, for the next character from U+0100 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(_BYTES)]
