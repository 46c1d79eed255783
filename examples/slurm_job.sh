# Sourced by the scripts for sbatch, in the checkout's root and inside a job: runs pretrain/gpt.py on all of its nodes.
source examples/setup.sh
source examples/recipe.sh
[ -n "${SLURM_JOB_ID:-}" ] || fail "this is no Slurm job: start it by sbatch; bash examples/one_node.sh needs none"
NPROC="${NPROC:-${SLURM_GPUS_ON_NODE:-1}}"
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER="${hosts[0]}"
# A port from the job's number: two jobs on one machine do not meet.
PORT="${PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
recipe_flags
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

# The time is nearly over. Without a signal to this script itself, scancel passes TERM to what srun has started.
TOLD=0
stop() {
    TOLD=1
    scancel --signal=TERM "$SLURM_JOB_ID"
}
trap stop USR1

srun --kill-on-bad-exit=1 "$PYTHON" -m torch.distributed.run \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$NPROC" \
    --rdzv-backend c10d --rdzv-endpoint "$MASTER:$PORT" --rdzv-id "$SLURM_JOB_ID" \
    "$ROOT/pretrain/gpt.py" "${FLAGS[@]}" "$@" &
JOB=$!
while true; do  # a signal ends wait, not what it waits for
    STATUS=0
    wait "$JOB" || STATUS=$?
    kill -0 "$JOB" 2>/dev/null || break
done
if [ "$TOLD" -eq 1 ] && [ "${REQUEUE:-1}" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$STATUS"
