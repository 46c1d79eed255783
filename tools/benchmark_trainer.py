"""Speed of transformers' Trainer on megazero, of plain Trainer with FSDP, and of a plain loop.

    megazero launch --as-deepspeed --num_gpus=2 tools/benchmark_trainer.py --how megazero --stage 2
    megazero launch --num_gpus=2 tools/benchmark_trainer.py --how fsdp
    megazero launch --num_gpus=2 tools/benchmark_trainer.py --how loop

The model has the shape of Llama-3.2 3B unless --hidden and the like say otherwise, random weights and tokens, bf16 with
float32 masters and AdamW, clipping, no recomputation and no torch.compile in any. The loop is torch's fully_shard over
the same model with fused AdamW. Prints a JSON line. FLOPs per token = 6 x (matmul parameters, head included) + 6 x
layers x hidden x sequence length: causal attention counts half. MFU is against the GPU's dense bf16 peak.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn

from megazero.errors import CommandLine
from megazero.telemetry.commit import running_commit
from megazero.telemetry.peaks import device_peak_flops


def parse() -> argparse.Namespace:
    parser = CommandLine(description=__doc__.split("\n")[0])
    parser.add_argument("--how", choices=("megazero", "fsdp", "loop"), required=True)
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO, for megazero")
    parser.add_argument("--hidden", type=int, default=3072)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--ffn", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--batch", type=int, default=4, help="samples per GPU and step")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the clock starts")
    parser.add_argument("--measure", type=int, default=15, help="steps on the clock")
    parser.add_argument("--local_rank", type=int, default=0)
    return parser.parse_args()


class Samples(torch.utils.data.Dataset):
    """Random tokens of each position's own."""

    def __init__(self, asked: argparse.Namespace, count: int) -> None:
        self._asked, self._count = asked, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self._asked.vocab, (self._asked.seq,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


class Clock:
    """Seconds from the end of the last step of warm-up to the end of the last one."""

    def __init__(self, warmup: int) -> None:
        self._warmup, self._steps, self.seconds = warmup, 0, 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._steps += 1
        if self._steps == self._warmup:
            self._start = self._now()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.seconds = self._now() - self._start

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def train(asked: argparse.Namespace, model: nn.Module, clock: Clock, folder: str) -> None:
    """By Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watch(TrainerCallback):
        on_step_end, on_train_end = clock.on_step_end, clock.on_train_end

    steps, world = asked.warmup + asked.measure, int(os.environ.get("WORLD_SIZE", "1"))
    more: dict[str, Any] = {"fsdp": True}
    if asked.how == "megazero":
        zero = {"stage": asked.stage, "overlap_comm": True, "contiguous_gradients": True}
        sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        config = {**dict.fromkeys(sizes, "auto"), "gradient_clipping": 1.0, "bf16": {"enabled": True}}
        more = {"deepspeed": {**config, "zero_optimization": zero}}
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=asked.batch,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        optim="adamw_torch_fused",
        logging_strategy="no",
        logging_nan_inf_filter=False,  # it would wait for the GPU at each step
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=2,
        **more,
    )
    data = Samples(asked, steps * asked.batch * world)
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Watch()]).train()


def loop(asked: argparse.Namespace, model: nn.Module, clock: Clock, device: torch.device) -> None:
    """By hand."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    gpu = device.type == "cuda"
    dist.init_process_group("nccl" if gpu else "gloo")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0, fused=True)
    steps, rank, world = asked.warmup + asked.measure, dist.get_rank(), dist.get_world_size()
    data = Samples(asked, steps * asked.batch * world)
    sampler = torch.utils.data.DistributedSampler(data, world, rank, shuffle=False)
    loader = torch.utils.data.DataLoader(data, asked.batch, sampler=sampler, num_workers=2, pin_memory=gpu)
    for batch in loader:
        batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.on_step_end()
    clock.on_train_end()


def main() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    asked = parse()
    config = LlamaConfig(
        vocab_size=asked.vocab,
        hidden_size=asked.hidden,
        intermediate_size=asked.ffn,
        num_hidden_layers=asked.layers,
        num_attention_heads=asked.heads,
        num_key_value_heads=asked.kv_heads,
        max_position_embeddings=asked.seq,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    with device:
        model = LlamaForCausalLM(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # The head is the embedding: counted once.
    matmul = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    flops = 6 * matmul + 6 * asked.layers * asked.hidden * asked.seq
    clock = Clock(asked.warmup)
    with tempfile.TemporaryDirectory() as folder:
        if asked.how == "loop":
            loop(asked, model, clock, device)
        else:
            train(asked, model, clock, folder)
    rate = asked.batch * asked.seq * asked.measure / clock.seconds  # of one GPU
    peak = device_peak_flops(torch.device("cuda"), "bf16") if gpu else None
    result = {
        "how": asked.how,
        "stage": asked.stage if asked.how == "megazero" else None,
        "gpus": dist.get_world_size(),
        "batch": asked.batch,
        "seq": asked.seq,
        "parameters": parameters,
        "ms_per_step": clock.seconds / asked.measure * 1e3,
        "tokens_per_second_per_gpu": rate,
        "tflops_per_gpu": rate * flops / 1e12,
        "mfu": rate * flops / peak if peak else None,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if gpu else None,
        "commit": running_commit(),
    }
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
