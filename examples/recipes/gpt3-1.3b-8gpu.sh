#!/usr/bin/env bash
# GPT-3 1.3B on the 8 GPUs of one machine: it fits each of them, so data parallel with ZeRO-1.
#   bash examples/recipes/gpt3-1.3b-8gpu.sh
# tools/plan_layout.py --model gpt3-1.3b --gpus 8 --gpu h100 --seq-length 2048
#   62,165 tokens/s per GPU, 53.2 % MFU, 63.1 of 78.4 GB; on A100s of 80 GB 24,484 tokens/s
# TP, PP, VPP, ZERO, MBS, GBS, RECOMPUTE, SEQ, STEPS, DATA and OUT in the environment change it; arguments go to
# pretrain/gpt.py.
set -euo pipefail
export MODEL="${MODEL:-gpt3-1.3b}"
export SEQ="${SEQ:-2048}"
export MBS="${MBS:-16}"
export GBS="${GBS:-2048}"
export ZERO="${ZERO:-1}"
export NPROC="${NPROC:-8}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/../one_node.sh" "$@"
