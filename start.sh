#!/usr/bin/env bash
# The main job on the embedded pair: sets everything up once, then scores HumanEval problems with the
# target alone, with exact drafting and with FLy, and compares them. What has finished is not run
# again. Details are in start.log and results/start/log.txt.
set -euo pipefail
cd "$(dirname "$0")"
export FLY_SCREEN=1 FLY_STEPS_BEFORE=2
out="results/start${LIMIT:+-$LIMIT}" # one for each LIMIT: a report shows a folder's newest run
pair=fly_config/qwen2.5-coder-guarded.json
task="--tasks humaneval_instruct --batch_size 1 --apply_chat_template --confirm_run_unsafe_code"

step() { # step NUMBER TEXT COMMAND...: one line while it runs, one when it has ended
    local head started=$SECONDS
    head="$(printf '%s/5  %-22s' "$1" "$2")"
    echo "$head 0:00  starting"
    shift 2
    "$@" >>start.log 2>&1 || { tail -n 15 start.log; echo "failed: all of it is in start.log"; exit 1; }
    printf '%s %d:%02d  done\n' "$head" $(((SECONDS - started) / 60)) $(((SECONDS - started) % 60))
}

: >start.log
source .ci/setup.sh
step 1 "install into .venv" fly_setup
export PATH="$PWD/.venv/bin:$PATH"
step 2 "models (1.6 GB, once)" fly pair fetch qwen2.5-coder
fly compare --model_args config_path=$pair,trace=true $task \
    --limit "${LIMIT:-8}" --modes target-only exact fly --output_path "$out"
fly report "$out/target-only" "$out/exact" "$out/fly" --output "$out/report.html"

cat <<TEXT

Next (source .venv/bin/activate first; leave --limit out for all 164 problems):
  a run of your own, exact, as lm-eval would do it
      fly --model hf --model_args config_path=$pair,enable_fly=false $task --limit 8 --log_samples --output_path out/exact
  did its scores hold?
      fly compare $out/target-only out/exact
  the same as a page, with all answers side by side
      fly report $out/target-only out/exact --output mine.html
  a pair of your own: two paths in a JSON file (README.md)
      fly config check $pair
TEXT
