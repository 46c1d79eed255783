"""Makes the checkpoints of test_deepspeed_import.py with DeepSpeed itself, on a CPU.

    python -m tests.convert.make_deepspeed TARGET [CASE ...]

Each case is the folder that save_checkpoint wrote, a tiny Hugging Face model's, with its config.json and
expected.safetensors: tokens and the logits that the model in DeepSpeed computed for them, and the tokens and losses of
the steps that followed the save. Needs deepspeed (pip install deepspeed==0.19.8, DS_BUILD_OPS=0) beside megazero's own
packages.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch._dynamo
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.convert.make_ranks import fork, pack

VOCAB, SEQ, STEPS, MORE = 61, 16, 2, 3
LEARNING_RATE = 0.01
# Case → model, ZeRO stage, ranks, precision, further settings of zero_optimization.
CASES: dict[str, dict[str, Any]] = {
    **{f"{kind}-stage{stage}": {"kind": kind, "stage": stage} for kind in ("gpt2", "llama") for stage in (1, 2, 3)},
    "llama-stage1-bf16": {"kind": "llama", "stage": 1, "bf16": True},
    "gpt2-stage2-3ranks": {"kind": "gpt2", "stage": 2, "world": 3, "zero": {"round_robin_gradients": True}},
    "llama-stage3-3ranks": {"kind": "llama", "stage": 3, "world": 3, "zero": {"sub_group_size": 500}},
}


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(5)
    if kind == "gpt2":
        ends = {"bos_token_id": 0, "eos_token_id": 1}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        shape = {"n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": SEQ}
        model: PreTrainedModel = GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCAB, initializer_range=0.2, **shape, **off, **ends)
        )
    else:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
        sizes = {"hidden_size": 12, "head_dim": 4, "intermediate_size": 20, "max_position_embeddings": SEQ}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, initializer_range=0.2, **heads, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    return model


def batch(step: int, world: int) -> torch.Tensor:
    """(world, SEQ + 1) tokens of a step."""
    return torch.randint(0, VOCAB, (world, SEQ + 1), generator=torch.Generator().manual_seed(step))


def train(engine: Any, step: int, rank: int, world: int) -> float:
    tokens = batch(step, world)[rank : rank + 1]
    logits = engine(input_ids=tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / world


def make(rank: int, folder: Path, store: str, kind: str, stage: int, world: int = 2, **more: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    limit = timedelta(seconds=300)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=limit)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = build(kind)
    config = model.config
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, **more.get("zero", {})},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": more.get("bf16", False)},
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=LEARNING_RATE), config=settings
    )
    for step in range(STEPS):
        train(engine, step, rank, world)
    tokens = batch(100, 2)[:, :-1].contiguous()
    with torch.no_grad():
        logits = engine(input_ids=tokens).logits.float().contiguous()
    engine.save_checkpoint(str(folder))
    losses = [train(engine, STEPS + step, rank, world) for step in range(MORE)]
    if rank == 0:
        config.save_pretrained(folder)
        for script in folder.glob("*.py"):
            script.unlink()
        batches = torch.stack([batch(STEPS + step, world) for step in range(MORE)])
        expected = {"tokens": tokens, "logits": logits, "batches": batches}
        expected["losses"] = torch.tensor(losses, dtype=torch.float64)
        save_file(expected, folder / "expected.safetensors")
    dist.barrier()


def main(target: Path, chosen: list[str]) -> None:
    torch.set_num_threads(1)
    torch._dynamo.config.disable = True
    # A collective through shared memory, which it would compile first; gloo does.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    for name, case in CASES.items():
        if chosen and name not in chosen:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder = target / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            fork(case.get("world", 2), make, folder, str(Path(scratch) / "store"), **case)
        print(name, flush=True)
    pack(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
