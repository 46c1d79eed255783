"""The examples as they stand, one after another in one process: example_runs.py OUT NAME…

There is one import more, before theirs; in trainer_runs.py, where there is none, somebody else answers to deepspeed.
OUT/NAME is an example's output, and OUT/NAME/logits.pt what the model in training gives for some tokens.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "huggingface"
SHORT = "--per_device_train_batch_size=2 --max_steps=4 --logging_steps=1 --disable_tqdm=true --learning_rate=1e-3"
NAMES = {
    "full": ("train_sft", "ds_config_zero2.json", "--samples=64 --eval_steps=2"),
    "lora": ("train_sft", "ds_config_zero2.json", "--samples=64 --eval_steps=2 --lora"),
    "cut": ("train_sft", "ds_config_zero3.json", "--samples=64 --eval_steps=2"),
    "offload": (
        "train_sft",
        "ds_config_zero3_offload.json",
        "--samples=32 --max_steps=2 --per_device_train_batch_size=1 --gradient_accumulation_steps=16",
    ),
    "trl": ("train_trl", "ds_config_zero3.json", ""),
}


def settings_of_ours(out: str) -> None:
    """Trainer and TrainingArguments by their own names, with a setting of their own."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from megazero.integrations.transformers import Trainer, TrainingArguments

    config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
    args = TrainingArguments(output_dir=f"{out}/ours", zero=config, use_cpu=True, max_steps=1, report_to="none")
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, n_positions=8, vocab_size=8))
    samples = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    trainer = Trainer(model=model, args=args, train_dataset=samples)
    assert trainer.engine is None
    trainer.train()
    assert trainer.engine.zero_optimization_stage() == 2 and trainer.engine.module is model


def run(name: str, out: Path) -> None:
    """The example, and the logits of what it has trained."""
    script, config, more = NAMES[name]
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    sys.argv = [script, f"--output_dir={out}/{name}", "--deepspeed", str(EXAMPLES / config)]
    sys.argv += [*SHORT.split(), *more.split()]
    trainer = importlib.import_module(script).main()

    import torch

    with torch.no_grad():
        logits = trainer.deepspeed.eval()(input_ids=torch.arange(24).view(2, 12)).logits
    if os.environ.get("RANK", "0") == "0":
        torch.save(logits, f"{out}/{name}/logits.pt")


def main() -> None:
    out, *names = sys.argv[1:]
    sys.path.append(str(ROOT))
    importlib.import_module("megazero.integrations.transformers")
    settings_of_ours(out)
    for name in names:
        run(name, Path(out))


if __name__ == "__main__":
    main()
