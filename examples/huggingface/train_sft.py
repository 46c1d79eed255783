"""Fine-tuning of a causal language model with transformers' Trainer: nothing here knows what DeepSpeed is.

megazero launch --as-deepspeed --num_gpus=8 examples/huggingface/train_sft.py \
    --deepspeed examples/huggingface/ds_config_zero2.json --model_name_or_path DIR --output_dir out

Without --model_name_or_path it is a small Llama on Jane Austen, which takes seconds on two CPU processes. With --lora
only adapters are trained. In between it evaluates and continues a prompt; in the end --output_dir is a folder for
from_pretrained, ready to be pushed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from peft import LoraConfig, get_peft_model
from tiny import Tokens, load, texts
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments, default_data_collator, set_seed


@dataclass
class Script:
    model_name_or_path: str | None = field(default=None, metadata={"help": "folder or name on the Hub; none: tiny"})
    train_file: str | None = field(default=None, metadata={"help": ".jsonl with text; none: Jane Austen"})
    max_length: int = field(default=128, metadata={"help": "tokens of a sample"})
    samples: int | None = field(default=None, metadata={"help": "of the file; none: all"})
    lora: bool = field(default=False, metadata={"help": "train adapters of q_proj and v_proj: r=16, alpha 32"})
    prompt: str = field(default="It is a truth", metadata={"help": "continued at each evaluation"})


@dataclass
class Arguments(TrainingArguments):
    bf16: bool = True
    use_cpu: bool = not torch.cuda.is_available()
    eval_strategy: str = "steps"
    eval_steps: float = 20
    report_to: str = "none"


class Continue(TrainerCallback):
    """Prints how the model goes on, at each evaluation."""

    def __init__(self, prompt: str) -> None:
        self.prompt, self.last = prompt, ""

    def on_evaluate(self, args, state, control, model, processing_class, **_):
        ids = processing_class(self.prompt, return_tensors="pt").input_ids.to(args.device)
        with torch.no_grad():
            made = model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=processing_class.pad_token_id)
        self.last = processing_class.decode(made[0], skip_special_tokens=True)
        if state.is_world_process_zero:
            print(f"step {state.global_step}: {self.last!r}", flush=True)


def main() -> Trainer:
    script, arguments = HfArgumentParser((Script, Arguments)).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    # After the arguments: they say whether weights are to be cut as they are loaded.
    model, tokenizer = load(script.model_name_or_path)
    if script.lora:
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]))
    samples = Tokens(texts(script.train_file, script.samples), tokenizer, script.max_length)
    held_out = len(samples) // 10 + 1
    train, test = torch.utils.data.random_split(
        samples, [len(samples) - held_out, held_out], torch.Generator().manual_seed(0)
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=test,
        data_collator=default_data_collator,
        processing_class=tokenizer,
        callbacks=[Continue(script.prompt)],
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_metrics("eval", trainer.evaluate(), combined=False)
    trainer.save_model()
    trainer.save_state()
    return trainer


if __name__ == "__main__":
    main()
