"""Trains, evaluates and generates with a Hugging Face model under stage 3 on the ranks it is launched on.

    megazero launch --nproc 2 tests/gpu/foreign_evaluation.py

Prints on rank 0 a JSON line: peak bytes of training, of the first two evaluation batches, of those that follow, and of
generation; and whether the generated tokens are those of the whole model in one process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

import megazero
from megazero.launch.devices import gpu_of
from tests.foreign.hf_models import llama

BATCHES = 50
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}


def peak_since(device: torch.device) -> int:
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def main() -> None:
    device = torch.device("cuda", gpu_of(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()))
    torch.cuda.set_device(device)
    dist.init_process_group()
    torch.manual_seed(0)
    engine, *_ = megazero.initialize(model=llama(**SIZES), config=CONFIG)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    batch = torch.randint(61, (4, 256), device=device, generator=generator)
    for _ in range(4):
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
    peaks = [peak_since(device)]
    engine.eval()
    for number in range(BATCHES):
        with torch.no_grad():
            engine(input_ids=batch, labels=batch)
        with torch.inference_mode():
            engine(input_ids=batch, labels=batch)
        if number == 1:
            peaks.append(peak_since(device))
    peaks.append(peak_since(device))
    prompt = torch.arange(8, device=device)[None]
    settings = {"max_new_tokens": 24, "do_sample": False, "synced_gpus": True}
    with torch.no_grad():
        tokens = engine.module.generate(prompt, **settings)
    peaks.append(peak_since(device))
    with megazero.zero.GatheredParameters(list(engine.module.parameters())):
        weights = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    whole = llama(**SIZES).to(device)
    for parameter in whole.parameters():  # and no buffer: rotary frequencies stay float32 under the engine
        parameter.data = parameter.data.bfloat16()
    whole.load_state_dict(weights)
    with torch.no_grad():
        wanted = whole.eval().generate(prompt, max_new_tokens=24, do_sample=False)
    if dist.get_rank() == 0:
        print("PEAKS", json.dumps({"peaks": peaks, "same": torch.equal(tokens, wanted)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
