# Sourced by the scripts beside it, after setup.sh. A recipe is a layout and a model, read from the environment:
#   TP PP ZERO      processes per matrix, pipeline stages, ZeRO stage
#   MBS GBS         samples per forward pass of a process, samples per step of all processes
#   VPP RECOMPUTE   model chunks of a pipeline rank, activations computed again (none, selective, full)
#   NPROC           processes on this machine; TP x PP must divide them, what is left is data parallel
#   MODEL SEQ STEPS a preset of megazero/presets.py, tokens per sample, steps
#   DATA            prefix of a .bin/.idx pair (data/preprocess.py); unset: Austen, tokenised on the spot
#   OUT             directory for metrics and checkpoints
# Arguments of the script go to pretrain/gpt.py, and win over all of these.

# Ends where one of these variables is set and holds no number that something can be counted by.
need_counts() {
    local name
    for name in "$@"; do
        [[ "${!name:-1}" =~ ^[1-9][0-9]*$ ]] || fail "$name=${!name}: give a whole number from 1 on, or leave it unset"
    done
}
need_counts NPROC NODES TP PP VPP MBS GBS SEQ STEPS

gpu_count() {
    if [ -z "${CUDA_VISIBLE_DEVICES-unset}" ]; then
        echo 0
        return
    fi
    "$PYTHON" -c 'import torch; print(torch.cuda.device_count())'
}

# The directory $1 that OUT asks for.
make_output() {
    mkdir -p "$1" 2>/dev/null && [ -w "$1" ] || fail "OUT=$1: nothing can be written there; choose another directory"
}

# Austen under a vocabulary of 4,096 pieces, made once per directory $1. Sets TOKENIZER, and the prefixes TOKENS and
# VALID: the last 5 % of the text is held out.
prepare_austen() {
    TOKENIZER="$1/austen-4096.model"
    TOKENS="$1/austen-train"
    VALID="$1/austen-valid"
    local corpus="$ROOT/data/austen/austen.jsonl"
    mkdir -p "$1"
    exec 7>"$1/.data.lock"
    if command -v flock >/dev/null; then flock 7; fi
    if [ ! -e "$TOKENIZER" ] || [ "$corpus" -nt "$TOKENIZER" ]; then
        rm -f "$TOKENS.idx" "$VALID.idx"
        "$PYTHON" "$ROOT/data/train_tokenizer.py" --input "$corpus" --vocab-size 4096 --output "$TOKENIZER"
    fi
    if [ ! -e "$TOKENS.idx" ] || [ ! -e "$VALID.idx" ]; then
        "$PYTHON" "$ROOT/data/preprocess.py" --input "$corpus" --tokenizer "sentencepiece:$TOKENIZER" --append-eod \
            --output "$TOKENS" --holdout 0.05 --holdout-output "$VALID"
    fi
    exec 7>&-
}

# Fills FLAGS from the environment.
recipe_flags() {
    : "${TP:=1}" "${PP:=1}" "${ZERO:=1}" "${MBS:=1}" "${MODEL:=gpt2-124m}" "${SEQ:=1024}" "${STEPS:=100}"
    : "${GBS:=32}" "${VPP:=1}" "${RECOMPUTE:=none}" "${OUT:=$ROOT/runs/$MODEL}"
    if [ -z "${DATA:-}" ]; then
        prepare_austen "$ROOT/runs/austen"
        DATA="$TOKENS"
    fi
    FLAGS=(
        --model.preset "$MODEL" --parallel.tp "$TP" --parallel.pp "$PP" --zero.stage "$ZERO"
        --parallel.virtual_pp "$VPP" --train.recompute "$RECOMPUTE"
        --train.micro_batch_size "$MBS" --train.global_batch_size "$GBS" --train.steps "$STEPS"
        --data.train "$DATA" --data.seq_length "$SEQ"
        --optimizer.warmup_steps "$((STEPS / 20))"
        --log.jsonl "$OUT/metrics.jsonl"
    )
    # An empty CHECKPOINTS saves nothing.
    local saved="${CHECKPOINTS-$OUT/checkpoints}"
    if [ -n "$saved" ]; then FLAGS+=(--checkpoint.dir "$saved"); fi
}

# One machine: launches pretrain/gpt.py on NPROC processes with FLAGS and this function's arguments.
train_here() {
    PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" \
        "$PYTHON" -m megazero launch --nproc "$NPROC" "$ROOT/pretrain/gpt.py" "${FLAGS[@]}" "$@"
}
