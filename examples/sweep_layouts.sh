#!/usr/bin/env bash
# Trains a few steps under each layout and prints one table. LAYOUTS holds "TP PP ZERO MBS" for each, separated by commas;
# MODEL, SEQ, GBS, STEPS, NPROC and DATA as in recipe.sh. A layout that does not work has its reason in the table.
#   NPROC=4 LAYOUTS="1 1 1 2, 2 1 1 2, 2 2 0 2" bash examples/sweep_layouts.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source "$ROOT/examples/recipe.sh"
if [ -z "${NPROC:-}" ]; then
    NPROC="$(gpu_count)"
    [ "$NPROC" -gt 0 ] || NPROC=2
fi
if [ -z "${LAYOUTS:-}" ]; then
    LAYOUTS="1 1 0 1, 1 1 1 1"
    [ $((NPROC % 2)) -ne 0 ] || LAYOUTS+=", 2 1 1 1, 1 2 1 1"
    [ $((NPROC % 4)) -ne 0 ] || LAYOUTS+=", 2 2 1 1"
fi
STEPS="${STEPS:-20}"
CHECKPOINTS=""
SWEEP="${OUT:-$ROOT/runs/sweep-$(date +%Y%m%d-%H%M%S)}"
IFS=',' read -ra layouts <<<"$LAYOUTS"
runs=()
for layout in "${layouts[@]}"; do
    read -r TP PP ZERO MBS <<<"$layout"
    OUT="$SWEEP/tp$TP-pp$PP-zero$ZERO-mbs$MBS"
    echo "tp=$TP pp=$PP zero=$ZERO mbs=$MBS on $NPROC processes" >&2
    recipe_flags
    make_output "$OUT"
    train_here --log.interval 5 "$@" >"$OUT/log.txt" 2>&1 || echo "  failed, see $OUT/log.txt" >&2
    runs+=("$OUT")
done
"$PYTHON" "$ROOT/examples/sweep_table.py" "${runs[@]}"
