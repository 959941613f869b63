#!/usr/bin/env bash
# The test suite. Without arguments: everything that needs no model download (minutes).
# `./test.sh -m real` runs the tests on the embedded pair; other arguments go to pytest as they are.
set -euo pipefail
cd "$(dirname "$0")"
source .ci/setup.sh
fly_setup dev
unset PYTHONDONTWRITEBYTECODE # the tests start many processes, which need not compile all anew
if [ $# -eq 0 ]; then
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the tests' models are tiny: one process per core
    set -- -m "not real and not slow" -n auto --dist worksteal
fi
exec python -m pytest "$@"
