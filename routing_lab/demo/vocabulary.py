"""The demo model's vocabulary: one token per printable ASCII character, newline, bos and eos."""

__all__ = ["BOS_ID", "CHARACTERS", "EOS_ID", "SIZE", "decode", "encode"]

CHARACTERS = "\n" + "".join(chr(code) for code in range(0x20, 0x7F))
BOS_ID = len(CHARACTERS)
EOS_ID = BOS_ID + 1
SIZE = EOS_ID + 1

_IDS = {character: index for index, character in enumerate(CHARACTERS)}


def encode(text: str) -> list[int]:
    """Return one token id per character, without bos or eos.

    Raises:
        ValueError: `text` has a character outside the vocabulary.
    """
    unknown = sorted(set(text) - _IDS.keys())
    if unknown:
        msg = f"characters outside the vocabulary: {unknown}"
        raise ValueError(msg)
    return [_IDS[character] for character in text]


def decode(ids: list[int]) -> str:
    """Return the text of `ids`; bos and eos have none."""
    return "".join(CHARACTERS[index] for index in ids if index < BOS_ID)
