#!/usr/bin/env bash
# Machines that share a file system and let you in by ssh without a password, started from any one of them. HOSTFILE has
# lines of HOST slots=N, N processes there; ranks meet at the first.
#   HOSTFILE=hosts TP=8 PP=2 bash examples/hostfile.sh
# RESTARTS (3): starts after failures in a row; LAUNCH: further flags of the launcher, e.g. "--env NCCL_DEBUG=INFO".
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source "$ROOT/examples/recipe.sh"
[ -f "${HOSTFILE:-}" ] || fail "HOSTFILE=${HOSTFILE:-}: no such file; give one with lines of HOST slots=N"
recipe_flags
read -ra LAUNCH <<<"${LAUNCH:-}"
PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m megazero launch \
    --hostfile "$HOSTFILE" --restarts "${RESTARTS:-3}" "${LAUNCH[@]}" \
    "$ROOT/pretrain/gpt.py" "${FLAGS[@]}" "$@"
