"""The script that builds a llama-server: where it puts it, and what it never deletes; the compiler is a stand-in."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from routing_lab.runtime.server_binary import LLAMA_CPP_PYTHON

ROOT = Path(__file__).parent.parent.parent
CMAKE = """#!/bin/sh
test "$1" = --build || exit 0
mkdir -p "$2/bin"
for name in llama-server llama-bench ggml-rpc-server; do
    printf '#!/bin/sh\\necho built\\n' >"$2/bin/$name"
    chmod +x "$2/bin/$name"
done
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the script and nothing else of the repository; the source is there already."""
    folder = tmp_path / "check out"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "build_llama_server.sh", folder / "scripts")
    (folder / "tools").mkdir()
    (folder / "tools" / "cmake").write_text(CMAKE)
    (folder / "tools" / "cmake").chmod(0o755)
    return folder


def build(checkout: Path, cache: str | None) -> subprocess.CompletedProcess[str]:
    place = checkout / (cache or f".cache/llama.cpp-{LLAMA_CPP_PYTHON}")
    package = f"llama_cpp_python-{LLAMA_CPP_PYTHON}"
    source = Path(f"{place}.work") / package / "vendor" / "llama.cpp"
    source.mkdir(parents=True)
    (source / "CMakeLists.txt").touch()
    (Path(f"{place}.work") / f"{package}.tar.gz").touch()
    environment = {key: value for key, value in os.environ.items() if key not in {"LLAMA_CPP_CACHE", "CMAKE_ARGS"}}
    environment["PYTHON"] = "/bin/false"  # nothing is fetched
    environment["PATH"] = f"{checkout / 'tools'}{os.pathsep}{environment['PATH']}"
    if cache is not None:
        environment["LLAMA_CPP_CACHE"] = cache
    command = ["sh", "scripts/build_llama_server.sh"]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("cache", [None, "elsewhere", "elsewhere//", "a folder/of mine"])
@pytest.mark.parametrize("before", ["nothing", "an empty folder", "an older build"])
def test_a_build_is_found_where_the_lab_looks_for_it(cache: str | None, before: str, checkout: Path) -> None:
    place = checkout / (cache or f".cache/llama.cpp-{LLAMA_CPP_PYTHON}")
    if before != "nothing":
        place.mkdir(parents=True)
    if before == "an older build":
        (place / "bin").mkdir()
        (place / "bin" / "llama-server").touch()
    done = build(checkout, cache)
    assert done.returncode == 0, done.stderr
    server = checkout / ".cache" / f"llama.cpp-{LLAMA_CPP_PYTHON}" / "bin" / "llama-server"
    assert os.access(server, os.X_OK)
    assert subprocess.run([server], capture_output=True, check=True).stdout == b"built\n"


@pytest.mark.parametrize("content", ["models/big.gguf", "bin/my-own-script"])
def test_a_folder_with_something_else_in_it_is_refused_and_left_alone(content: str, checkout: Path) -> None:
    treasure = checkout / "home" / content
    treasure.parent.mkdir(parents=True)
    treasure.write_text("dear")
    done = build(checkout, "home")
    assert (done.returncode, "holds something else than a build" in done.stderr) == (2, True)
    assert treasure.read_text() == "dear"
    assert not (checkout / ".cache" / f"llama.cpp-{LLAMA_CPP_PYTHON}").is_symlink()
