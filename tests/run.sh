#!/usr/bin/env bash
# Sets up what the tests need, unless it is there, and runs pytest with the arguments given.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tests/python_env.sh
need_python test torch numpy sentencepiece einops wandb pydantic safetensors yaml rich \
    transformers tokenizers tiktoken pyarrow zstandard tensorboard pytest hypothesis ruff setuptools wheel megatron.core \
    peft accelerate
# Hundreds of processes will load the same modules: let the first compile them for all.
unset PYTHONDONTWRITEBYTECODE
exec "$PYTHON" -m pytest "$@"
