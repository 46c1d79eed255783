"""transformers' and accelerate's own DeepSpeed tests against megazero: what passes, is skipped, and fails, and why.

    python tools/run_hf_deepspeed_tests.py DIR [PYTEST ARGS…]

DIR: a checkout of huggingface/transformers (tests/trainer/distributed) or huggingface/accelerate (tests/deepspeed), of
the release that is installed; the tests need `parameterized`. The small models that they take from the Hub are made
from configs here, with random weights. On a machine without a GPU those of one process run all the same, on the CPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/trainer/distributed/test_trainer_distributed_deepspeed.py", "tests/deepspeed")
MODELS = "MEGAZERO_TEST_MODELS"
"""Environment variable: the folder of the models that stand for the Hub's."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", metavar="DIR", type=Path, help="a checkout of transformers or accelerate")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="pytest's")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    found = [str(folder / test) for test in TESTS if (folder / test).exists()]
    if not found:
        print(f"{folder} holds neither {' nor '.join(TESTS)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as models:
        environment = os.environ | {MODELS: models, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "RUN_SLOW": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(folder), str(folder / "src")])
        pytest = [
            "-p",
            "tools.run_hf_deepspeed_tests",
            "-p",
            "no:cacheprovider",
            "-q",
            "-rA",
            "--tb=line",
            "--show-capture=no",
        ]
        command = [sys.executable, "-m", "megazero.integrations.deepspeed", "-m", "pytest", *pytest]
        return subprocess.run([*command, *found, *asked.arguments], cwd=folder, env=environment).returncode


# From here on: the plugin, in pytest's process.


def pytest_configure(config: Any) -> None:
    """Before a test module is imported."""
    import torch

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # each test says for itself whether there are processes
        os.environ.pop(name, None)
    folder = Path(os.environ[MODELS])
    _make_models(folder)
    _answer_for_the_hub(folder)
    if not torch.cuda.is_available():
        _run_without_gpu()


def _make_models(folder: Path) -> None:
    import transformers

    small = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 1000}
    t5 = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 1000}
    for name, config in (
        ("gpt2", transformers.GPT2Config(**small)),
        ("gptj", transformers.GPTJConfig(**small, rotary_dim=8)),
        ("t5", transformers.T5Config(**t5)),
    ):
        kind = {"gpt2": "GPT2LMHeadModel", "gptj": "GPTJForCausalLM", "t5": "T5ForConditionalGeneration"}[name]
        getattr(transformers, kind)(config).save_pretrained(folder / name)


def _answer_for_the_hub(folder: Path) -> None:
    """Names of the Hub are those folders, for configs and models."""
    from transformers import AutoConfig, PreTrainedModel
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    def local(name: Any) -> Any:
        known = [kind for kind in ("gptj", "gpt2", "t5") if isinstance(name, str) and kind in name.lower()]
        return str(folder / known[0]) if known and not Path(name).exists() else name

    for owner in (AutoConfig, _BaseAutoModelClass, PreTrainedModel):
        before = owner.from_pretrained.__func__

        def from_pretrained(cls: type, name: Any, *args: Any, before: Any = before, **kwargs: Any) -> Any:
            return before(cls, local(name), *args, **kwargs)

        owner.from_pretrained = classmethod(from_pretrained)


def _run_without_gpu() -> None:
    """Tests that ask for one GPU run without; those that ask for several stay skipped."""
    import accelerate.test_utils.testing as accelerates
    import transformers.testing_utils as transformers_own
    import transformers.training_args

    def as_it_is(test: Any) -> Any:
        return test

    transformers_own.require_torch_accelerator = as_it_is
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True  # it asks for a GPU, and the CPU has bfloat16
    for name in ("require_cuda", "require_non_cpu", "require_cuda_or_hpu", "require_cuda_or_xpu"):
        setattr(accelerates, name, as_it_is)


if __name__ == "__main__":
    sys.exit(main())
