#!/bin/sh
# Builds llama-server, llama-bench and ggml-rpc-server, with shared libraries, from the llama.cpp source that the pinned
# llama-cpp-python carries, so that server and library in process are of one version. Called by `make llama-server`.
#
#   PYTHON           whose pip fetches the source, and cmake where there is none (default: python3)
#   LLAMA_CPP_CACHE  where the build is kept (default: .cache/llama.cpp-VERSION in the checkout, which becomes a link)
#   CMAKE_ARGS       more flags for cmake, for instance -DGGML_CUDA=ON
#   JOBS             compilers at once (default: every core)
set -eu

version=0.3.36
digest=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
root=$(cd "$(dirname "$0")/.." && pwd)
place=$root/.cache/llama.cpp-$version
cache=${LLAMA_CPP_CACHE:-$place}
case $cache in /*) ;; *) cache=$PWD/$cache ;; esac # the link is read from another folder
while [ "$cache" != "${cache%/}" ]; do cache=${cache%/}; done
python=${PYTHON:-python3}
programs="llama-server llama-bench ggml-rpc-server"

complete() {
    for program in $programs; do
        test -x "$1/bin/$program" || return 1
    done
}

fetch() {
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --require-hashes \
        --dest "$work" --requirement "$work/requirement.txt" "$@"
}

# A folder may have been named by mistake, and hold anything; only a build is ever replaced.
replaceable() {
    case $(ls -A "$1") in
        "") ;;
        bin) test -e "$1/bin/llama-server" ;;
        *) return 1 ;;
    esac
}

mkdir -p "$root/.cache" "$(dirname "$cache")"
if [ -L "$cache" ] && [ ! -e "$cache" ]; then
    rm "$cache"
fi
if [ -e "$cache" ] && ! complete "$cache" && ! replaceable "$cache"; then
    echo "$cache holds something else than a build of llama.cpp: name a folder that is new or empty" >&2
    exit 2
fi
if [ "$cache" != "$place" ]; then
    if [ -e "$place" ] && [ ! -L "$place" ]; then
        echo "$place is a build of its own: remove it, or leave LLAMA_CPP_CACHE unset" >&2
        exit 2
    fi
    ln -sfn "$cache" "$place"
fi
if complete "$cache"; then
    exit 0
fi

if ! command -v cmake >/dev/null; then
    "$python" -m pip install --quiet --disable-pip-version-check cmake ninja
    PATH=$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH
fi
if command -v ninja >/dev/null; then generator=Ninja; else generator="Unix Makefiles"; fi

work=$cache.work
archive=$work/llama_cpp_python-$version.tar.gz
mkdir -p "$work"
if [ ! -f "$archive" ]; then
    echo "fetching the source of llama-cpp-python $version"
    # pip asks every source it downloads for its metadata, and that of this one sets up a build for minutes. So it gets
    # a stand-in for the build program that knows the answer.
    mkdir -p "$work/stand-in/scikit_build_core"
    : >"$work/stand-in/scikit_build_core/__init__.py"
    cat >"$work/stand-in/scikit_build_core/build.py" <<EOF
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    import os
    name = "llama_cpp_python-$version.dist-info"
    os.mkdir(os.path.join(folder, name))
    with open(os.path.join(folder, name, "METADATA"), "w") as file:
        print("Metadata-Version: 2.1", "Name: llama_cpp_python", "Version: $version", sep=chr(10), file=file)
    return name
EOF
    echo "llama-cpp-python==$version --hash=sha256:$digest" >"$work/requirement.txt"
    PYTHONPATH="$work/stand-in" fetch --no-build-isolation || fetch
fi
source=$work/llama_cpp_python-$version/vendor/llama.cpp
if [ ! -f "$source/CMakeLists.txt" ]; then
    tar -xzf "$archive" -C "$work"
fi

echo "compiling llama-server once (about a quarter of an hour on two cores)"
# The libraries lie beside the programs, wherever the folder goes.
# shellcheck disable=SC2086 - CMAKE_ARGS are several words
cmake -S "$source" -B "$work/build" -G "$generator" -Wno-dev --log-level=WARNING \
    -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_RPC=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_UI=OFF \
    -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON '-DCMAKE_INSTALL_RPATH=$ORIGIN' ${CMAKE_ARGS:-}
# shellcheck disable=SC2086 - programs are several words
cmake --build "$work/build" --parallel "${JOBS:-$(getconf _NPROCESSORS_ONLN)}" --target llama $programs

# It appears whole: a build that was interrupted is never taken for a finished one.
mkdir -p "$work/new"
cp -a "$work/build/bin" "$work/new/"
complete "$work/new"
"$work/new/bin/llama-server" --version
mkdir -p "$cache"
rm -rf "$cache/bin"
mv "$work/new/bin" "$cache/bin"
rm -rf "$work"
