#!/usr/bin/env bash
# From a fresh clone to a sentence: tokenizer, tokens, a small GPT on 4 processes (tp=2, pp=2), checkpoints, validation,
# export to Hugging Face, and a sample from the exported model. About five minutes on two CPU cores.
#   bash examples/quickstart.sh
#   NPROC=2 TP=1 PP=2 bash examples/quickstart.sh --train.steps 200
# NPROC, TP and PP choose the layout, OUT the directory (runs/quickstart); arguments go to pretrain/gpt.py. What is
# already in OUT is used: an interrupted run continues, a finished one is only evaluated and sampled. A second
# quickstart at the same time gets a directory of its own.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source "$ROOT/examples/recipe.sh"

# Sets NPROC, TP and PP where they are unset, and says why where four GPUs are not what there is.
choose_layout() {
    local gpus asked="${NPROC:-${TP:+$((TP * ${PP:-1}))}}"
    asked="${asked:-${PP:-}}"
    gpus="$(gpu_count)"
    if [ -n "$asked" ]; then
        NPROC="$asked"
        if [ "$gpus" -gt 0 ] && [ "$NPROC" -gt "$gpus" ]; then
            fail "$NPROC processes need $NPROC GPUs and there are $gpus; CUDA_VISIBLE_DEVICES= uses the CPU instead"
        fi
    elif [ "$gpus" -ge 4 ]; then
        NPROC=4
    elif [ "$gpus" -ge 2 ]; then
        NPROC=2
        echo "$gpus GPUs: 2 processes in place of 4"
    elif [ "$gpus" -eq 1 ]; then
        NPROC=1
        echo "1 GPU: 1 process in place of 4"
    else
        NPROC=4
        echo "no GPU: 4 processes on the CPU"
    fi
    if [ -z "${TP:-}" ]; then
        TP=1
        if [ $((NPROC % (2 * ${PP:-1}))) -eq 0 ]; then TP=2; fi
    fi
    if [ -z "${PP:-}" ]; then
        PP=1
        if [ "$NPROC" -eq $((3 * TP)) ]; then PP=3; elif [ $((NPROC % (2 * TP))) -eq 0 ]; then PP=2; fi
    fi
    [ $((NPROC % (TP * PP))) -eq 0 ] || fail "tp x pp = $TP x $PP does not divide $NPROC processes"
    DP=$((NPROC / (TP * PP)))
    # Of the 8 samples of a step, half the share of a process at a time, so that a pipeline has two micro-batches.
    [ $((8 % DP)) -eq 0 ] || fail "dp = $DP ($NPROC processes / tp x pp = $TP x $PP) does not divide the batch of 8"
    MBS=$((DP == 8 ? 1 : 4 / DP))
}

# Takes OUT for this run alone; where another run has it, a directory beside it.
claim_output() {
    OUT="${OUT:-$ROOT/runs/quickstart}"
    make_output "$OUT"
    exec 9>"$OUT/.lock"
    if command -v flock >/dev/null && ! flock -n 9; then
        echo "another quickstart is writing to $OUT; this one goes to $OUT-$$"
        OUT="$OUT-$$"
        make_output "$OUT"
        exec 9>"$OUT/.lock"
        flock -n 9
    fi
}

choose_layout
claim_output
echo "$NPROC processes: tp=$TP, pp=$PP, dp=$DP; output in $OUT"
prepare_austen "$OUT"
FLAGS=(
    --config "$ROOT/examples/quickstart.yaml" --parallel.tp "$TP" --parallel.pp "$PP"
    --train.micro_batch_size "$MBS" --data.train "$TOKENS" --data.valid "$VALID"
    --checkpoint.dir "$OUT/checkpoints" --log.jsonl "$OUT/metrics.jsonl"
)
train_here "$@"
"$PYTHON" "$ROOT/examples/quickstart_report.py" --metrics "$OUT/metrics.jsonl" --train "$TOKENS" --valid "$VALID"
rm -rf "$OUT/hf"
"$PYTHON" "$ROOT/tools/convert_checkpoint.py" export --from "$OUT/checkpoints" --to "$OUT/hf"
"$PYTHON" "$ROOT/examples/sample_hf.py" --model "$OUT/hf" --tokenizer "$TOKENIZER" --prompt "She was"
