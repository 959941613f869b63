#!/usr/bin/env bash
# The main job on the embedded pair: sets everything up once, scores HumanEval with the target alone
# and with FLy, and compares the two. What has finished is not run again.
set -euo pipefail
cd "$(dirname "$0")"
source .ci/setup.sh
fly_setup

fly pair fetch qwen2.5-coder

out=results/start
command=(fly compare --model_args config_path=fly_config/qwen2.5-coder-guarded.json,trace=true
    --tasks humaneval_instruct --batch_size 1 --apply_chat_template --confirm_run_unsafe_code
    --limit "${LIMIT:-8}" --modes target-only fly --output_path "$out")
echo "running: ${command[*]}"
"${command[@]}"
fly report "$out/target-only" "$out/fly" --output "$out/report.html"

cat <<'TEXT'

What to try next (source .venv/bin/activate first):
  FLy's tokens, live, by their origin:      fly trace "Write a function that reverses a list." \
                                                --model_args config_path=fly_config/qwen2.5-coder.json
  one run, as lm-eval would do it:          fly --model hf --model_args config_path=fly_config/qwen2.5-coder-guarded.json \
                                                --tasks humaneval_instruct --batch_size 1 --apply_chat_template \
                                                --confirm_run_unsafe_code
  the fastest setting that holds here:      fly tune fly_config/qwen2.5-coder.json --help
  a pair of your own:                       copy fly_config/FLy_Qwen25_Coder_1.5b.json, edit it,
                                            fly config check FILE
  all options:                              fly run --help, docs/configuration.md
TEXT
