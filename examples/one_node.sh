#!/usr/bin/env bash
# All GPUs of one machine: tensor parallel inside, the rest data parallel, unless the environment says otherwise.
#   TP=2 PP=2 bash examples/one_node.sh
#   MODEL=llama3-8b SEQ=8192 TP=4 PP=2 ZERO=1 GBS=64 bash examples/one_node.sh --train.recompute full
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source "$ROOT/examples/recipe.sh"
if [ -z "${NPROC:-}" ]; then
    NPROC="$(gpu_count)"
    if [ "$NPROC" -eq 0 ]; then
        NPROC="$((${TP:-1} * ${PP:-1}))"
        echo "no GPU here: $NPROC processes on the CPU"
    fi
fi
recipe_flags
train_here "$@"
