#!/usr/bin/env bash
# Two machines (or NODES of them) that share a file system. Run it on each, with the same variables, and NODE_RANK 0 to
# NODES - 1; MASTER is a name or address of machine 0 that all of them reach.
#   MASTER=node-a NODE_RANK=0 TP=8 PP=2 bash examples/two_nodes.sh     # on node-a
#   MASTER=node-a NODE_RANK=1 TP=8 PP=2 bash examples/two_nodes.sh     # on node-b
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source "$ROOT/examples/recipe.sh"
NODES="${NODES:-2}"
[ -n "${MASTER:-}" ] || fail "MASTER is unset: the name or address of the machine with NODE_RANK=0"
[ -n "${NODE_RANK:-}" ] || fail "NODE_RANK is unset: 0 on $MASTER, 1 to $((NODES - 1)) on the others"
if [ -z "${NPROC:-}" ]; then
    NPROC="$(gpu_count)"
    [ "$NPROC" -gt 0 ] || fail "no GPU on this machine; NPROC=N starts N processes on its CPU"
fi
recipe_flags
PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m torch.distributed.run \
    --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC" \
    --master-addr "$MASTER" --master-port "${PORT:-29500}" \
    "$ROOT/pretrain/gpt.py" "${FLAGS[@]}" "$@"
