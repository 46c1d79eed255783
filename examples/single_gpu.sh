#!/usr/bin/env bash
# One process, on a GPU if there is one.
#   bash examples/single_gpu.sh
#   MODEL=gpt3-1.3b SEQ=2048 MBS=4 bash examples/single_gpu.sh --train.recompute selective
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source "$ROOT/examples/recipe.sh"
NPROC="${NPROC:-1}"
recipe_flags
train_here "$@"
