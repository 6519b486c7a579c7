"""Which libraries the override fits is told from the file alone, with the reason why one does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from routing_lab.errors import RuntimeUnsupportedError
from routing_lab.runtime import RuntimeOptions
from routing_lab.runtime import llama as llama_module
from routing_lab.runtime.llama import LlamaRuntime, libllama_path
from routing_lab.runtime.native import override_library
from routing_lab.runtime.symbols import BUILD_MOE_FFN, N_EXPERT_USED, defined_symbols, unfit_reason

OLD_FORM = BUILD_MOE_FFN.removesuffix("S1_S1_")


@pytest.fixture
def library(tmp_path: Path) -> Callable[..., Path]:
    """Compiles a libllama.so that defines nothing but functions of these names."""

    def compile_one(*names: str) -> Path:
        source = "\n".join(f'void f{i}(void) __asm__("{name}"); void f{i}(void) {{}}' for i, name in enumerate(names))
        target = tmp_path / "libllama.so"
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(target)]
        subprocess.run(command, input=source, text=True, check=True)
        return target

    return compile_one


def test_the_installed_libllama_fits() -> None:
    assert unfit_reason(libllama_path()) is None
    assert {BUILD_MOE_FFN, N_EXPERT_USED, "llama_decode"} <= defined_symbols(libllama_path())


def test_the_override_library_defines_what_it_replaces_and_its_own_functions() -> None:
    own = {name for name in defined_symbols(override_library()) if name.startswith("routing_lab_")}
    assert own == {"routing_lab_bind", "routing_lab_set", "routing_lab_report", "routing_lab_reset_report"}
    assert {BUILD_MOE_FFN, N_EXPERT_USED} <= defined_symbols(override_library())


def test_a_library_with_both_symbols_fits(library: Callable[..., Path]) -> None:
    assert unfit_reason(library("llama_decode", BUILD_MOE_FFN, N_EXPERT_USED)) is None


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["puts_on_a_show"], "it is no libllama"),
        (["llama_decode"], r"hides its C\+\+ symbols"),
        (["llama_decode", OLD_FORM, N_EXPERT_USED], rf"another signature \({OLD_FORM}\)"),
        (["llama_decode", N_EXPERT_USED], "it has no build_moe_ffn"),
        (["llama_decode", BUILD_MOE_FFN], "older than September 2026"),
    ],
)
def test_a_library_that_does_not_fit_is_told_why_and_what_is_supported(
    library: Callable[..., Path], names: list[str], reason: str
) -> None:
    path = library(*names)
    found = unfit_reason(path)
    assert found is not None
    assert str(path) in found
    assert "supported: a shared libllama" in found
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"!<arch>\n" + b" " * 60, "static archive"),
        (b"\xcf\xfa\xed\xfe" + b"\0" * 60, "macOS library"),
        (b"MZ" + b"\0" * 60, "Windows library"),
        (b"#!/bin/sh\n" + b" " * 60, "no shared library"),
        (b"\x7fELF\x01\x01" + b"\0" * 60, "not a 64-bit little-endian one"),
        (b"\x7fELF\x02\x01" + b"\0" * 12 + b"\xf3\x00" + b"\0" * 60, "ELF machine 243"),
        (b"\x7fELF\x02\x01" + b"\0" * 12 + b"\x3e\x00" + b"\xff" * 60, "truncated or damaged"),
        (b"", "no shared library"),
    ],
)
def test_other_file_formats_are_named(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "libllama.so"
    path.write_bytes(data)
    assert reason in str(unfit_reason(path))


def test_every_truncation_of_a_library_is_refused_without_a_crash(library: Callable[..., Path]) -> None:
    path = library("llama_decode", BUILD_MOE_FFN, N_EXPERT_USED)
    whole = path.read_bytes()
    for size in range(0, len(whole) - 1, 97):
        path.write_bytes(whole[:size])
        assert unfit_reason(path) is not None


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_what_is_no_file_is_named_and_not_waited_for(nonfile: Callable[..., Path], kind: str) -> None:
    with pytest.raises(RuntimeUnsupportedError, match=f"cannot read .*{kind}"):
        defined_symbols(nonfile(kind))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "cannot read" in str(unfit_reason(tmp_path / "libllama.so"))


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_named(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    assert system in str(unfit_reason(Path("libllama.so")))


def test_a_folder_without_a_libllama_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeUnsupportedError, match=f"no libllama in {tmp_path}"):
        LlamaRuntime(model, RuntimeOptions(library_dir=tmp_path))


def test_the_environment_variable_of_llama_cpp_python_is_honoured(
    monkeypatch: pytest.MonkeyPatch, library: Callable[..., Path]
) -> None:
    path = library("llama_decode")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(path.parent))
    assert libllama_path() == path


@pytest.mark.model
def test_a_library_of_another_time_is_refused_with_what_it_lacks(model: Path, library: Callable[..., Path]) -> None:
    path = library("llama_decode", BUILD_MOE_FFN, N_EXPERT_USED)
    with pytest.raises(RuntimeUnsupportedError, match="cannot use this libllama"):
        LlamaRuntime(model, RuntimeOptions(library_dir=path.parent))


@pytest.mark.model
def test_an_install_without_the_compiled_library_still_runs_and_says_what_is_missing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Path:
        raise RuntimeUnsupportedError("the expert override library was not built")

    monkeypatch.setattr(llama_module, "override_library", missing)
    with LlamaRuntime(model, RuntimeOptions(context_tokens=256)) as runtime:
        assert runtime.capability == "uniform_only"
        assert runtime.no_override_reason == "the expert override library was not built"
        assert runtime.generate("7", max_tokens=1).tokens == 1


def test_the_compiled_library_is_looked_for_beside_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from routing_lab.runtime import native

    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    assert native.plain_kernels_library() is None
    with pytest.raises(RuntimeUnsupportedError, match=r"C\+\+17 compiler"):
        native.override_library()
