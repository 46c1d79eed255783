# Sourced by the scripts beside it. Sets ROOT (the checkout) and PYTHON: an interpreter that already has every package,
# else one in $ROOT/.venv, made on the spot. PYTHON=/path/to/python chooses one.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() {
    echo "error: $*" >&2
    exit 1
}

source "$ROOT/tests/python_env.sh"
need_python convert torch numpy sentencepiece einops pydantic safetensors yaml rich transformers
export PYTHON
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
