#!/usr/bin/env bash
# GPT-2 774M on one card of 24 GB: the largest preset whose 18 bytes per parameter fit with activations.
#   bash examples/recipes/gpt2-774m-24gb.sh
# tools/plan_layout.py --model gpt2-774m --gpus 1 --gpu rtx4090 --seq-length 1024 --global-batch-size 512
#   20,164 tokens/s, 60.1 % MFU, 18.2 of 21.1 GB
# TP, PP, VPP, ZERO, MBS, GBS, RECOMPUTE, SEQ, STEPS, DATA and OUT in the environment change it; arguments go to
# pretrain/gpt.py.
set -euo pipefail
export MODEL="${MODEL:-gpt2-774m}"
export SEQ="${SEQ:-1024}"
export MBS="${MBS:-4}"
export GBS="${GBS:-512}"
export ZERO="${ZERO:-0}"
export RECOMPUTE="${RECOMPUTE:-selective}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/../single_gpu.sh" "$@"
