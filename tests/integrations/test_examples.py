"""The examples for transformers, peft and trl: smaller models, fewer processes, all else as it stands.

As DeepSpeed's, on two processes: `tests.integrations.test_trainer.test_examples`.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.integrations.launched import HERE, ROOT, launched, python

EXAMPLES = ROOT / "examples" / "huggingface"


def check(folder: Path, adapters: bool = False) -> None:
    """The folder is what from_pretrained takes; the model it gives is the one that was trained."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("It is a truth").input_ids) == "It is a truth"
    if adapters:
        set_seed(42)
        model = PeftModel.from_pretrained(tiny().load(None)[0], folder)  # drawn as the example draws it
        for parameter in model.parameters():  # and not buffers: a rotary frequency would be another one
            parameter.data = parameter.data.to(torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.arange(24).view(2, 12)).logits
    assert torch.equal(logits, torch.load(folder / "logits.pt"))
    assert json.loads((folder / "eval_results.json").read_text())["eval_loss"] < 5.553  # log 258


def tiny() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_tiny", EXAMPLES / "tiny.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_by_an_explicit_import_and_without_a_launcher(tmp_path: Path) -> None:
    done = python(HERE / "example_runs.py", tmp_path, "trl", "offload")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "offload: masters (fp32) and moments (fp32) in host memory" in done.stdout
    for name in ("trl", "offload"):
        check(tmp_path / name)


@pytest.mark.whole
def test_started_by_accelerate(tmp_path: Path) -> None:
    """The config comes by accelerate's file, as does DeepSpeed; the script says nothing of either."""
    words = f"--output_dir {tmp_path} --samples 16 --max_steps 1 --per_device_train_batch_size 2".split()
    accelerate = (sys.executable, "-m", "accelerate.commands.launch")  # what `accelerate launch` is
    script = EXAMPLES / "train_sft.py"
    done = launched("--as-deepspeed", "--", *accelerate, "--config_file", HERE / "accelerate.yaml", script, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "megazero: ZeRO stage 3, bfloat16" in done.stdout
    assert (tmp_path / "model.safetensors").is_file()
