"""Supervised fine-tuning with trl on questions and answers, the loss on the answers alone.

megazero launch --as-deepspeed --num_gpus=8 examples/huggingface/train_trl.py \
    --deepspeed examples/huggingface/ds_config_zero3.json --model_name_or_path DIR --output_dir out

Without --model_name_or_path it is a small Llama that learns to repeat words; --train_file is a .jsonl with prompt and
completion.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset
from tiny import load
from transformers import HfArgumentParser, set_seed
from trl import SFTConfig, SFTTrainer


@dataclass
class Script:
    model_name_or_path: str | None = field(default=None, metadata={"help": "folder or name on the Hub; none: tiny"})
    train_file: str | None = field(default=None, metadata={"help": ".jsonl with prompt and completion; none: words"})


@dataclass
class Arguments(SFTConfig):
    bf16: bool = True
    use_cpu: bool = not torch.cuda.is_available()
    max_length: int = 128
    report_to: str = "none"


WORDS = "pride prejudice sense sensibility persuasion emma mansfield park northanger abbey".split()


def pairs(file: str | None) -> list[dict[str, str]]:
    if file is not None:
        return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines() if line]
    return [{"prompt": f"{a} {b}? ", "completion": f"{a} {b}."} for a in WORDS for b in WORDS if a != b]


def main() -> SFTTrainer:
    script, arguments = HfArgumentParser((Script, Arguments)).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    model, tokenizer = load(script.model_name_or_path)
    samples = Dataset.from_list(pairs(script.train_file)).train_test_split(0.1, seed=0)
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=samples["train"],
        eval_dataset=samples["test"],
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_metrics("eval", trainer.evaluate(), combined=False)
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
