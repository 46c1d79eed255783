#!/usr/bin/env bash
# Measures the layouts of one machine's GPUs, a power of two of them, and prints three tables and a check:
#   1. MODEL under data, tensor and pipeline parallelism and ZeRO 1 to 3: speed, peak memory, exposed communication, the
#      first losses beside those of the first layout, and the plan for chips of kind GPU
#   2. SCALED, which fits one GPU, on 1, 2, 4 … of them with the same work for each, ZeRO 1 and 3
#   3. a few steps under tensor, pipeline and data parallelism, and more of them from that checkpoint under data
#      parallelism alone: the losses go on
#   GPU=h200 bash examples/measure_layouts.sh
# MODEL SCALED SEQ MBS GBS (sequences of a step of MODEL) STEPS (timed ones) GPU NPROC and OUT in the environment change
# it; arguments go to all runs. 8 GPUs take 10 layouts, 8 runs of SCALED and 2 short runs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source "$ROOT/examples/recipe.sh"
gpus="$(gpu_count)" PROFILE=""
[ "$gpus" -eq 0 ] || PROFILE=2
NPROC="${NPROC:-$gpus}"
[ "$NPROC" -gt 1 ] || fail "NPROC=$NPROC: there is nothing to lay out; on a machine without GPUs give NPROC and a small MODEL"
[ $((NPROC & (NPROC - 1))) -eq 0 ] || fail "NPROC=$NPROC is not a power of two"
: "${MODEL:=llama3-8b}" "${SCALED:=llama3.2-3b}" "${SEQ:=4096}" "${STEPS:=16}" "${MBS:=2}" "${GBS:=$((4 * NPROC))}"
OUT="${OUT:-$ROOT/runs/layouts-$(date +%Y%m%d-%H%M%S)}"
make_output "$OUT"
half=$((NPROC / 2)) quarter=$((NPROC / 4))

runs=("dp=$NPROC,zero=1,mbs=$MBS" "dp=$NPROC,zero=2,mbs=$MBS" "dp=$NPROC,zero=3,mbs=$MBS")
runs+=("tp=2,dp=$half,zero=1,mbs=$MBS" "pp=2,dp=$half,mbs=1" "tp=$NPROC,mbs=$MBS")
if [ "$quarter" -ge 1 ]; then
    runs+=("tp=2,pp=2,dp=$quarter,zero=1,mbs=1" "tp=2,pp=2,dp=$quarter,zero=1,mbs=1,parallel.virtual_pp=2")
    runs+=("pp=4,dp=$quarter,zero=1,mbs=1")
fi
[ "$quarter" -lt 2 ] || runs+=("tp=4,dp=$quarter,zero=1,mbs=$MBS")
common=(--data.seq_length "$SEQ" --warmup 4 --measure "$STEPS" ${GPU:+--gpu "$GPU"} --zero.stage3_param_persistence_threshold 10000)
failed=0
layouts() {
    "$PYTHON" "$ROOT/tools/benchmark_layouts.py" --json "$OUT/$1.jsonl" "${@:2}" 2>"$OUT/$1.txt" || failed=1
}
echo "$MODEL on $NPROC processes, $GBS sequences of $SEQ a step; what the runs say is in $OUT"
layouts layouts --model.preset "$MODEL" --train.global_batch_size "$GBS" --train.recompute selective \
    ${PROFILE:+--profile "$PROFILE"} \
    "${common[@]}" --runs "${runs[@]}" "$@"

runs=()
for stage in 1 3; do
    for ((n = 1; n <= NPROC; n *= 2)); do
        runs+=("dp=$n,zero=$stage,mbs=$MBS,train.global_batch_size=$((MBS * n))")
    done
done
echo "$SCALED, $MBS sequences a step for each process"
layouts scaling --model.preset "$SCALED" "${common[@]}" --runs "${runs[@]}" "$@"

echo "$MODEL from one layout into another"
export NPROC MODEL SEQ GBS ZERO=1 MBS=1
export OUT="$OUT/resumed"
TP=2 PP="$((NPROC > 2 ? 2 : 1))" STEPS=8 bash "$ROOT/examples/one_node.sh" --train.recompute selective \
    --optimizer.schedule constant "$@" >"$OUT.txt" 2>&1 &&
    TP=1 PP=1 ZERO=3 STEPS=12 bash "$ROOT/examples/one_node.sh" --train.recompute selective \
        --optimizer.schedule constant "$@" >>"$OUT.txt" 2>&1 || failed=1
grep -ho 'step [0-9]*/[0-9]*  loss [0-9.]*\|resumed step .*' "$OUT.txt" || true
exit "$failed"
