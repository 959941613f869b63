# Sourced by start.sh, test.sh and .ci/run: the virtual environment, made once.
# Sets nothing but PATH; installs again only when pyproject.toml or constraints.txt changed.
fly_setup() { # fly_setup [extra]: "" or "dev"
    local extra="${1:-}" venv="$PWD/.venv" stamp key
    stamp="$venv/.fly-installed-${extra:-base}"
    key="$(cat pyproject.toml constraints.txt | cksum)"
    if [ ! -x "$venv/bin/python" ]; then
        local python="${PYTHON:-python3}"
        if ! command -v "$python" >/dev/null; then
            echo "start: $python is not here: install Python 3.10 to 3.13, or set PYTHON" >&2
            return 2
        fi
        if ! "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'; then
            echo "start: $("$python" --version) is not supported: set PYTHON to 3.10 to 3.13" >&2
            return 2
        fi
        echo "making a virtual environment in .venv"
        "$python" -m venv "$venv" || {
            rm -rf "$venv"
            echo "start: python's venv module failed: on Debian install python3-venv" >&2
            return 2
        }
    fi
    export PATH="$venv/bin:$PATH"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$key" ]; then
        echo "installing fly and its dependencies into .venv (a minute or two)"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
            -c constraints.txt -e ".${extra:+[$extra]}" 2>&1 | { grep -vE '^ *(WARNING|DEPRECATION)' || true; }
        [ "${PIPESTATUS[0]}" -eq 0 ] || return 2
        echo "$key" >"$stamp"
    fi
}
