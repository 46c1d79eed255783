#!/usr/bin/env bash
# Llama-3.2 3B on one H200.
#   bash examples/recipes/llama3.2-3b-h200.sh
# tools/plan_layout.py --model llama3.2-3b --gpus 1 --gpu h200 --seq-length 8192
#   23,454 tokens/s, 55.7 % MFU, 105.9 of 141.0 GB
# TP, PP, VPP, ZERO, MBS, GBS, RECOMPUTE, SEQ, STEPS, DATA and OUT in the environment change it; arguments go to
# pretrain/gpt.py.
set -euo pipefail
export MODEL="${MODEL:-llama3.2-3b}"
export SEQ="${SEQ:-8192}"
export MBS="${MBS:-2}"
export GBS="${GBS:-512}"
export ZERO="${ZERO:-0}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/../single_gpu.sh" "$@"
