#!/usr/bin/env bash
# The main job on the embedded pair: sets everything up once, then scores HumanEval with FLy.
set -euo pipefail
cd "$(dirname "$0")"
source .ci/setup.sh
fly_setup

fly pair fetch qwen2.5-coder

command=(fly --model hf --model_args config_path=fly_config/qwen2.5-coder.json
    --tasks humaneval_instruct --batch_size 1 --apply_chat_template --confirm_run_unsafe_code
    --limit "${LIMIT:-8}" --output_path results --log_samples)
echo "running: ${command[*]}"
"${command[@]}"

cat <<'TEXT'

What to try next (source .venv/bin/activate first):
  the same without relaxation (lossless):   add ,enable_fly=false to --model_args
  the target alone, the honest baseline:    add ,use_sd=false
  a pair of your own:                       copy fly_config/FLy_Qwen25_Coder_1.5b.json, edit it,
                                            fly config check FILE
  all options:                              fly run --help, and README.md
TEXT
