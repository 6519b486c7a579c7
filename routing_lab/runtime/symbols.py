"""Reads the symbol table of a library file, without loading it, to tell whether the expert override fits."""

from __future__ import annotations

import re
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from routing_lab.errors import RuntimeUnsupportedError
from routing_lab.files import open_file

__all__ = ["BUILD_MOE_FFN", "N_EXPERT_USED", "defined_symbols", "unfit_reason"]

BUILD_MOE_FFN = (
    "_ZNK17llm_graph_context13build_moe_ffnEP11ggml_tensorS1_S1_S1_S1_S1_S1_S1_S1_S1_ll15llm_ffn_op_typebf"
    "29llama_expert_gating_func_typeiS1_S1_S1_S1_S1_S1_S1_"
)
"""``llm_graph_context::build_moe_ffn``, long form, of llama.cpp from September to October 2026."""
N_EXPERT_USED = "_ZNK13llama_hparams13n_expert_usedEj"
"""``llama_hparams::n_expert_used(uint32_t)``: the count of one block. Builds before September 2026 lack it."""

_SUPPORTED = "supported: a shared libllama of llama.cpp from September or October 2026 on Linux x86-64 or aarch64"

_ELF_MAGIC = b"\x7fELF"
_OTHER_FORMATS = {
    b"!<arch>\n": "a static archive",
    b"\xcf\xfa\xed\xfe": "a macOS library",
    b"\xca\xfe\xba\xbe": "a macOS universal library",
    b"MZ": "a Windows library",
}
_MACHINES = {62: "x86-64", 183: "aarch64"}  # e_machine of the ELF specification

_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SHT_DYNSYM = 11
_SHN_UNDEF = 0


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int


def _sections(data: bytes) -> list[_Section]:
    header = _ELF_HEADER.unpack_from(data)
    table, entry_size, count = header[6], header[11], header[12]
    raw = (_SECTION.unpack_from(data, table + index * entry_size) for index in range(count))
    return [_Section(kind=row[1], offset=row[4], size=row[5], link=row[6]) for row in raw]


def _check_format(path: Path, data: bytes) -> None:
    for magic, name in _OTHER_FORMATS.items():
        if data.startswith(magic):
            raise RuntimeUnsupportedError(f"{path} is {name}; {_SUPPORTED}")
    if not data.startswith(_ELF_MAGIC):
        raise RuntimeUnsupportedError(f"{path} is no shared library; {_SUPPORTED}")
    if data[4:6] != b"\x02\x01":  # ELFCLASS64, ELFDATA2LSB
        raise RuntimeUnsupportedError(f"{path} is an ELF file, but not a 64-bit little-endian one; {_SUPPORTED}")
    machine = struct.unpack_from("<H", data, 18)[0]
    if machine not in _MACHINES:
        raise RuntimeUnsupportedError(f"{path} is built for ELF machine {machine}; {_SUPPORTED}")


def defined_symbols(path: Path) -> frozenset[str]:
    """Names that the dynamic symbol table of the shared library ``path`` defines.

    Raises:
        RuntimeUnsupportedError: ``path`` is missing or is no 64-bit ELF library of a supported machine.
    """
    try:
        with open_file(path) as file:
            data = file.read()
    except OSError as error:
        raise RuntimeUnsupportedError(f"cannot read {path}: {error.strerror}") from error
    _check_format(path, data)
    try:
        sections = _sections(data)
        names: set[str] = set()
        for section in (one for one in sections if one.kind == _SHT_DYNSYM):
            strings = sections[section.link].offset
            for name, _, _, index, _, _ in _SYMBOL.iter_unpack(data[section.offset : section.offset + section.size]):
                if index != _SHN_UNDEF:
                    start = strings + name
                    names.add(data[start : data.index(b"\0", start)].decode("utf-8", "replace"))
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise RuntimeUnsupportedError(f"{path} is a truncated or damaged ELF file; {_SUPPORTED}") from error
    return frozenset(names)


def _what_is_missing(symbols: frozenset[str]) -> str | None:
    missing = [name for name in (BUILD_MOE_FFN, N_EXPERT_USED) if name not in symbols]
    if not missing:
        return None
    if not any(name.startswith("llama_") for name in symbols):
        return "it is no libllama: it exports no llama_* function"
    if not any(re.search(r"llm_graph_context|llama_hparams", name) for name in symbols):
        return "it hides its C++ symbols (built with hidden visibility)"
    long_forms = sorted(name for name in symbols if "13build_moe_ffnE" in name)
    if BUILD_MOE_FFN in missing and long_forms:
        return f"its build_moe_ffn has another signature ({', '.join(long_forms)})"
    if BUILD_MOE_FFN in missing:
        return "it has no build_moe_ffn"
    return "it has no llama_hparams::n_expert_used(uint32_t), so it is older than September 2026"


def unfit_reason(library: Path) -> str | None:
    """Why the expert override cannot work on the libllama at ``library``; ``None`` when both its symbols are there.

    That both are there is necessary, not sufficient: whether libllama really calls them through its symbol table
    shows only in a running graph, which attestation reads.
    """
    if not sys.platform.startswith("linux"):
        return f"per-block counts need Linux and this is {sys.platform}; {_SUPPORTED}"
    try:
        symbols = defined_symbols(library)
    except RuntimeUnsupportedError as error:
        return str(error)
    missing = _what_is_missing(symbols)
    return None if missing is None else f"{library}: {missing}; {_SUPPORTED}"
