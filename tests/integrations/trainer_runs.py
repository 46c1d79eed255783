"""What transformers' Trainer does with megazero for deepspeed: a script for `megazero launch --as-deepspeed`, 2 ranks,
on the CPU, or on GPUs where there are some.

trainer_runs.py OUT writes OUT/results.json: name of each function below with `@run` → what it returned, or the error.
One process does all of it, as importing the libraries takes longer than any of the runs.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import example_runs
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import distributed as dist
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.integrations import unset_hf_deepspeed_config

from megazero.errors import MegazeroError
from megazero.foreign.consolidate import consolidate
from megazero.launch.mistakes import about_a_config

OUT = Path(next(word for word in sys.argv[1:] if not word.startswith("--")))
RANK = int(os.environ["RANK"])
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
STAGES = (1, 2, 3)
SAVING = {"save_strategy": "steps", "save_steps": 2}
RUNS: dict[str, Callable[[], Any]] = {}
FULL: dict[str, Any] = {}
"""What `full` returned."""


def run(function: Callable[[], Any]) -> Callable[[], Any]:
    RUNS[function.__name__] = function
    return function


class Samples(torch.utils.data.Dataset):
    def __init__(self, count: int = 32, seed: int = 0) -> None:
        self.tokens = torch.randint(64, (count, 12), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )


def settings(stage: int, **changes: Any) -> dict[str, Any]:
    zero = {name: "auto" for name in ("reduce_bucket_size", "stage3_prefetch_bucket_size")}
    zero |= {"stage": stage, "stage3_param_persistence_threshold": 40}
    zero |= {"stage3_gather_16bit_weights_on_model_save": True}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero,
        **changes,
    }


def arguments(name: str, deepspeed: dict[str, Any] | str | None, **changes: Any) -> TrainingArguments:
    given = {
        "output_dir": str(OUT / name),
        "per_device_train_batch_size": 4 // int(os.environ["WORLD_SIZE"]),
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": DEVICE.type == "cpu",
        "seed": 1,
        "ddp_find_unused_parameters": False,
    }
    return TrainingArguments(deepspeed=deepspeed, **given | changes)


def fresh() -> LlamaForCausalLM:
    set_seed(3)
    return LlamaForCausalLM(config())


def masked() -> BertForMaskedLM:
    """Its head is tied by a bias as well, whose size the library looks at."""
    set_seed(3)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=64, max_position_embeddings=16, **sizes, **still))


def pretrained() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(OUT / "pretrained")


def trainer(model: torch.nn.Module, args: TrainingArguments, **more: Any) -> Trainer:
    return Trainer(model=model, args=args, train_dataset=Samples(), eval_dataset=Samples(8, seed=1), **more)


def history(made: Trainer) -> dict[str, list[float]]:
    return {
        key: [line[key] for line in made.state.log_history if key in line] for key in ("loss", "grad_norm", "eval_loss")
    }


def trained(model: torch.nn.Module, args: TrainingArguments) -> dict[str, list[float]]:
    made = trainer(model, args)
    made.train()
    return history(made)


def plain_loss(model: torch.nn.Module) -> float:
    """Of the held-out samples, by the library alone."""
    tokens = Samples(8, seed=1).tokens.to(DEVICE)
    with torch.no_grad():
        return model.to(DEVICE).eval()(input_ids=tokens, labels=tokens).loss.item()


def together() -> None:
    """All files are written, and no later from_pretrained cuts weights."""
    unset_hf_deepspeed_config()
    if dist.is_initialized():
        dist.barrier()


def looped(accelerator: Accelerator, out: Path | None, dummies: bool) -> dict[str, Any]:
    """accelerate's loop, with a state saved in the middle and gone back to: losses, norms, and the later ones again."""
    model = fresh()
    # Small steps and no tiny eps: Adam turns rounding of gradients near zero into whole steps.
    options = {"lr": 2e-3, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(model.parameters(), **options, eps=1e-6)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if dummies:
        optimizer = DummyOptim(model.parameters(), **options)
        scheduler = DummyScheduler(optimizer, lr_scheduler_callable=_one_over)
    loader = torch.utils.data.DataLoader(Samples(), batch_size=4 // int(os.environ["WORLD_SIZE"]))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    batches, losses, norms = list(loader), [], []

    def steps(chosen: list[Any]) -> None:
        for batch in chosen:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())

    steps(batches[:4])
    if out is not None:
        accelerator.save_state(str(out))
    steps(batches[4:])
    if out is not None:
        accelerator.load_state(str(out))
        steps(batches[4:])
    state = accelerator.get_state_dict(model)
    names = sorted(state) if state else []
    return {"losses": losses, "norms": norms, "weights": names == sorted(LlamaForCausalLM(config()).state_dict())}


def _one_over(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


@run
def accelerated() -> dict[str, Any]:
    """accelerate without Trainer: objects of one's own, or the config's optimizer and a function for the schedule.

    First of all: Accelerators leave traces in the next ones of a process, and Trainer's change what a plain one does.
    """
    adamw = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "eps": 1e-6}}
    results = {}
    for name, stage, dummies in (("plain", 0, False), ("own 2", 2, False), ("own 3", 3, False), ("config 3", 3, True)):
        arguments("accelerated", None)  # which starts the processes' group on the CPU
        zero = settings(stage, **({"optimizer": adamw} if dummies else {}), gradient_accumulation_steps=2)
        zero["gradient_clipping"] = 0.5
        del zero["fp16"], zero["bf16"]
        plugin = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=zero)} if stage else {}
        accelerator = Accelerator(gradient_accumulation_steps=2, step_scheduler_with_optimizer=False, **plugin)
        results[name] = looped(accelerator, OUT / "accelerated" if stage else None, dummies)
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        together()
    return results


@run
def full() -> dict[str, Any]:
    """Training with evaluation: plain, and by stage; ``resumed`` goes on from the checkpoints."""
    evaluation = {"eval_strategy": "steps", "eval_steps": 2}
    results = {"plain": trained(fresh(), arguments("plain", None, **evaluation))}
    for stage in STAGES:
        saving = {} if stage == 2 else SAVING
        results[str(stage)] = trained(fresh(), arguments(f"full-{stage}", settings(stage), **evaluation, **saving))
    FULL.update(results)
    return results


@run
def optimizer_of_the_config() -> dict[str, Any]:
    """The config's optimizer has no groups, so weight decay, which Trainer keeps off norms, is none here."""
    adamw = {"type": "AdamW", "params": {name: "auto" for name in ("lr", "betas", "eps", "weight_decay")}}
    plain = trained(fresh(), arguments("plain", None, weight_decay=0.0))
    args = arguments("optimizer", settings(3, optimizer=adamw), weight_decay=0.0)
    return {"plain": plain, "3": trained(fresh(), args)}


@run
def resumed() -> dict[str, Any]:
    """(what the steps after a checkpoint were, what they are when it is resumed), by stage; the schedule's kind too."""
    results = {}
    decay = {
        "type": "WarmupDecayLR",
        "params": {f"warmup_{name}": "auto" for name in ("min_lr", "max_lr", "num_steps")},
    }
    decay["params"]["total_num_steps"] = "auto"
    for stage, more in ((1, {}), (2, {"scheduler": decay}), (3, {})):
        name = f"resumed-{stage}" if more else f"full-{stage}"
        first = (
            trained(fresh(), arguments(name, settings(stage, **more), **SAVING))
            if more
            else (FULL or full())[str(stage)]
        )
        made = trainer(LlamaForCausalLM(config()), arguments(name, settings(stage, **more), **SAVING))
        made.train(resume_from_checkpoint=str(OUT / name / "checkpoint-2"))
        results[str(stage)] = [first["loss"][2:], history(made)["loss"][2:]]
    return results


@run
def saved() -> dict[str, Any]:
    """Best-model reloading and saving: (Trainer's own evaluation, the plain library's of what was saved)."""
    results = {}
    for stage in (1, 2, 3):
        args = arguments(
            f"saved-{stage}",
            settings(stage),
            learning_rate=0.3,  # so that the best is not the last
            save_strategy="steps",
            save_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            load_best_model_at_end=True,
        )
        made = trainer(fresh(), args)
        made.train()
        best = made.evaluate()["eval_loss"]
        made.save_model(str(OUT / f"saved-{stage}" / "final"))
        together()
        found = AutoModelForCausalLM.from_pretrained(OUT / f"saved-{stage}" / "final")
        results[str(stage)] = {"all": history(made)["eval_loss"], "best": best, "plain": plain_loss(found)}
    return results


@run
def from_pretrained() -> dict[str, Any]:
    """Weights cut as they are loaded, or as the model is made, and then the same training."""
    if RANK == 0:
        fresh().save_pretrained(OUT / "pretrained")
    together()
    results = {"plain": trained(pretrained(), arguments("plain", None))}
    args = arguments("cut", settings(3))
    model = pretrained().to(DEVICE)  # as scripts do
    results["cut"] = sorted({type(parameter).__name__ for parameter in model.parameters()})
    results["3"] = trained(model, args)
    args = arguments("made", settings(3))
    model = AutoModelForCausalLM.from_config(config())
    results["made"] = sorted({type(parameter).__name__ for parameter in model.parameters()})
    results["made losses"] = trained(model, args)["loss"]
    if RANK == 0:
        masked().save_pretrained(OUT / "masked")
    together()
    for name, zero in (("plain", None), ("3", settings(3))):
        args = arguments(f"masked-{name}", zero)
        results[f"masked {name}"] = trained(AutoModelForMaskedLM.from_pretrained(OUT / "masked"), args)
    return results


@run
def resized() -> dict[str, Any]:
    results = {}
    for name, zero in (("plain", None), ("2", settings(2)), ("3", settings(3))):
        args = arguments(f"resized-{name}", zero)
        model = pretrained()
        torch.manual_seed(7)  # the new rows are drawn
        model.resize_token_embeddings(72)
        made = trainer(model, args)
        made.train()
        made.save_model()
        results[name] = history(made)
        together()
        results[f"{name} rows"] = AutoModelForCausalLM.from_pretrained(args.output_dir).lm_head.weight.shape[0]
    return results


def adapted(**more: Any) -> torch.nn.Module:
    model = pretrained()
    torch.manual_seed(7)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], **more))


@run
def lora() -> dict[str, Any]:
    """Adapters, and a head that is trained whole; what is saved is loaded by peft alone."""
    results: dict[str, Any] = {}
    for kind, more in (("adapters", {}), ("head", {"modules_to_save": ["lm_head"]})):
        for name, zero in (("plain", None), *((("2", settings(2)),) if kind == "adapters" else ()), ("3", settings(3))):
            args = arguments(f"{kind}-{name}", zero, save_strategy="steps", save_steps=2)
            made = trainer(adapted(**more), args)
            made.train()
            made.save_model(args.output_dir + "/final")
            ours = made.evaluate()["eval_loss"]
            together()
            found = PeftModel.from_pretrained(pretrained(), args.output_dir + "/final")
            results[f"{kind} {name}"] = {**history(made), "ours": ours, "plain": plain_loss(found)}
    return results


@run
def evaluated() -> dict[str, Any]:
    """Without training, at stage 3: nothing is kept to train with."""
    args = arguments("evaluated", settings(3), bf16=True)
    made = trainer(pretrained(), args)
    loss = made.evaluate()["eval_loss"]
    prompt, options = torch.tensor([[1, 2, 3]], device=DEVICE), {"do_sample": False, "pad_token_id": 0}
    generated = made.model.generate(prompt, max_new_tokens=6, **options)
    engine = made.model_wrapped
    masters = sum(block.master is not block.values for block in engine.sharded.blocks)
    together()
    model = pretrained().to(DEVICE, torch.bfloat16)
    plain = model.generate(prompt, max_new_tokens=6, **options)
    return {
        "loss": [loss, plain_loss(model)],
        "generated": [generated.tolist(), plain.tolist()],
        "optimizer": str(engine.optimizer),
        "trains": all(parameter.requires_grad for parameter in made.model.parameters()),
        "masters": masters,
    }


@run
def half_precision() -> dict[str, Any]:
    return {
        f"{name} {stage}": trained(fresh(), arguments(f"{name}-{stage}", settings(stage), **{name: True}))["loss"]
        for name, stage in (("bf16", 3), ("fp16", 2))
    }


@run
def mistakes() -> dict[str, str]:
    """What is wrong in a config → what the user is told, in the launcher's way: with a traceback, or without."""

    def said(error: Exception) -> str:
        message = str(error) if isinstance(error, MegazeroError) else about_a_config(error)
        return f"{type(error).__name__}: {message}" if message is not None else traceback.format_exc()

    def told(deepspeed: dict[str, Any] | str, model: torch.nn.Module | None = None, **changes: Any) -> str:
        try:
            trained(fresh() if model is None else model, arguments("mistakes", deepspeed, **changes))
        except Exception as error:
            return said(error)
        return "no error"

    adamw = {"type": "AdamW", "params": {"lr": "auto"}}
    misspelt = settings(2)
    misspelt["zero_optimization"]["overlap_com"] = True
    results = {
        "unknown key": told(misspelt),
        "both precisions": told(settings(2, fp16={"enabled": True}, bf16={"enabled": True})),
        "batch product": told(settings(2, train_batch_size=9)),
        "optimizer argument": told(settings(2, optimizer={"type": "AdamW", "params": {"lr": "auto", "momentum": 0.9}})),
        "unknown optimizer": told(settings(2, optimizer={"type": "AdamQ", "params": {}})),
        "tensor parallel": told(settings(2, tensor_parallel={"autotp_size": 2})),
        "auto that Trainer does not fill": told(
            settings(2, optimizer={"type": "SGD", "params": {"lr": "auto", "momentum": "auto"}})
        ),
    }
    cut = OUT / f"cut-{RANK}.json"
    cut.write_text('{"train_batch_size": "auto",\n "zero_optimization": ')
    results["not JSON"] = told(str(cut))
    twice = settings(2, optimizer=adamw, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=1)
    # Of the config's optimizer and its own, Trainer takes the config's; accelerate asks which.
    for name, config_of_two in (("optimizer twice", twice), ("auto without a source", settings(3))):
        arguments("mistakes", None)
        model = fresh() if name == "optimizer twice" else torch.nn.Linear(2, 2)
        try:
            accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config_of_two))
            accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
            results[name] = "no error"
        except Exception as error:
            results[name] = said(error)
    try:
        both = {"train_batch_size": 2, "fp16": {"enabled": True}, "bf16": {"enabled": True}}
        deepspeed.initialize(model=torch.nn.Linear(2, 2), config=both)
    except Exception as error:
        results["both precisions, without Trainer"] = said(error)
    return results


@run
def troubles() -> dict[str, Any]:
    """docs/troubleshooting.md: what is seen, and what helps, at stage 3."""
    ungathered = settings(3)
    ungathered["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = False
    args = arguments("troubles", ungathered)
    made = trainer(fresh(), args)
    made.train()
    made.save_model()
    results: dict[str, Any] = {"files": sorted(os.listdir(args.output_dir)), "ours": made.evaluate()["eval_loss"]}
    weight, told = made.model.lm_head.weight, {}
    results["told"] = told
    for name, use in (
        ("save_pretrained", lambda: made.model.save_pretrained(OUT / "none")),
        ("torch.save", lambda: torch.save(made.model.state_dict(), OUT / "none.bin")),
        ("weight", lambda: weight.norm()),
    ):
        try:
            use()
            told[name] = "no error"
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    with deepspeed.zero.GatheredParameters(weight):
        results["norm"] = weight.norm().item()
    if RANK == 0:
        consolidate(args.output_dir, OUT / "troubles-consolidated")
    together()
    model = LlamaForCausalLM(config())
    model.load_state_dict(load_file(OUT / "troubles-consolidated" / "model.safetensors"))
    results |= {"plain": plain_loss(model), "plain norm": model.lm_head.weight.norm().item()}
    results["predictions"] = list(made.predict(Samples(8)).predictions.shape)
    made.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
    results["preprocessed"] = list(made.predict(Samples(8)).predictions.shape)
    made.args.prediction_loss_only = True
    results["loss only"] = made.predict(Samples(8)).predictions
    cut = [block for block in made.model_wrapped.sharded.blocks if block.sharding.parameters]
    results["resident"] = sum(block.flat.untyped_storage().nbytes() for block in cut)
    return results


def examples() -> dict[str, Any]:
    """The scripts of examples/huggingface as they stand; nothing here or there says who answers to deepspeed."""
    names = ("full", "lora", "cut", "trl")
    for name in names:
        example_runs.run(name, OUT / "examples")
        together()
    return {"names": names}


if DEVICE.type == "cpu":
    run(examples)


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # Trainer begins with a collection, which takes 0.4 s if it goes through the libraries too
    results: dict[str, Any] = {}
    chosen = [word.removeprefix("--only=").split(",") for word in sys.argv if word.startswith("--only=")]
    for name in chosen[0] if chosen else RUNS:
        try:
            results[name] = RUNS[name]()
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        together()
    if RANK == 0:
        (OUT / "results.json").write_text(json.dumps(results))
        for path in OUT.iterdir():
            if path.is_dir() and path.name != "examples":
                shutil.rmtree(path)


main()
