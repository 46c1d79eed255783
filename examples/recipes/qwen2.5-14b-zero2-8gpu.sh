#!/usr/bin/env bash
# Qwen2.5 14B with ZeRO-2 on the 8 GPUs of one machine: gradients and optimizer state cut over two replicas of a
# pipeline of four.
#   bash examples/recipes/qwen2.5-14b-zero2-8gpu.sh
# tools/plan_layout.py --model qwen2.5-14b --gpus 8 --gpu h100 --seq-length 4096
#   5,736 tokens/s per GPU, 52.2 % MFU, 77.3 of 78.4 GB; ZeRO-3 without a pipeline: 5,520 tokens/s
# TP, PP, VPP, ZERO, MBS, GBS, RECOMPUTE, SEQ, STEPS, DATA and OUT in the environment change it; arguments go to
# pretrain/gpt.py.
set -euo pipefail
export MODEL="${MODEL:-qwen2.5-14b}"
export SEQ="${SEQ:-4096}"
export PP="${PP:-4}"
export MBS="${MBS:-1}"
export GBS="${GBS:-1024}"
export ZERO="${ZERO:-2}"
export NPROC="${NPROC:-8}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/../one_node.sh" "$@"
