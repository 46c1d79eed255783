#!/usr/bin/env bash
# Adapters (LoRA, r=16 on q_proj and v_proj) on Llama-3.1 8B, by peft and transformers' Trainer: the frozen model takes
# two bytes per parameter on every GPU, and only the adapters have gradients and optimizer state.
#   MODEL=DIR bash examples/recipes/llama3.1-8b-lora.sh       DIR: its Hugging Face folder
# tools/plan_layout.py --model llama3.1-8b --lora 16 --gpus 8 --gpu h100 --seq-length 4096 --global-batch-size 64
#   12,070 tokens/s per GPU, 75.1 of 78.4 GB; this plan of time has no run behind it
# ZERO, MBS, GBS, RECOMPUTE (none or full), SEQ, STEPS, NPROC, OUT and DATA (a .jsonl with text; unset: Austen) in the
# environment change it; TP and PP are 1, as every process has whole layers. Arguments go to
# examples/huggingface/train_sft.py.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"
need_python huggingface torch transformers peft accelerate
[ -n "${MODEL:-}" ] || fail "MODEL is unset: give the Hugging Face folder of Llama-3.1 8B"
[ "${TP:-1}" = 1 ] && [ "${PP:-1}" = 1 ] || fail "TP=${TP:-1} PP=${PP:-1}: a Hugging Face model is neither; leave both at 1"
: "${ZERO:=2}" "${MBS:=2}" "${GBS:=64}" "${RECOMPUTE:=none}" "${SEQ:=4096}" "${STEPS:=100}" "${NPROC:=8}"
: "${OUT:=$ROOT/runs/llama3.1-8b-lora}"
[ $((MBS * NPROC)) -gt 0 ] && [ "$GBS" -gt 0 ] || fail "MBS=$MBS NPROC=$NPROC GBS=$GBS: each must be at least 1"
ACCUMULATED=$((GBS / (MBS * NPROC)))
[ $((ACCUMULATED * MBS * NPROC)) -eq "$GBS" ] || fail "GBS=$GBS is not a multiple of MBS x NPROC = $MBS x $NPROC"
case "$RECOMPUTE" in
    none | full) ;;
    *) fail "RECOMPUTE=$RECOMPUTE: none or full" ;;
esac
FLAGS=(
    --lora --model_name_or_path "$MODEL" --max_length "$SEQ" --max_steps "$STEPS" --output_dir "$OUT"
    --per_device_train_batch_size "$MBS" --gradient_accumulation_steps "$ACCUMULATED" --learning_rate 2e-4
)
if [ "$RECOMPUTE" = full ]; then FLAGS+=(--gradient_checkpointing true); fi
if [ -n "${DATA:-}" ]; then FLAGS+=(--train_file "$DATA"); fi
mkdir -p "$OUT"
cat >"$OUT/ds_config.json" <<EOF
{
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": 1.0,
  "bf16": { "enabled": true },
  "zero_optimization": { "stage": $ZERO }
}
EOF
PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m megazero launch --as-deepspeed --num_gpus="$NPROC" \
    "$ROOT/examples/huggingface/train_sft.py" --deepspeed "$OUT/ds_config.json" "${FLAGS[@]}" "$@"
