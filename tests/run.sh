#!/usr/bin/env bash
# Sets up what the tests need, unless it is there, and runs pytest with the arguments given.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Hundreds of processes will load the same modules: the first compiles them for all.
unset PYTHONDONTWRITEBYTECODE
. tests/python_env.sh
need_python test torch numpy sentencepiece einops wandb pydantic safetensors yaml rich \
    transformers tokenizers tiktoken pyarrow zstandard tensorboard pytest xdist hypothesis ruff setuptools wheel megatron.core \
    peft accelerate trl datasets
# Most tests keep one core busy. -n 0 runs them all in one process.
exec "$PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
