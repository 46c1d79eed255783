"""A model of your own as a pipeline: megazero launch --nproc 4 examples/pipeline.py --stages 2

Bytes of Jane Austen, each from those before it, by layers of plain PyTorch. Four processes in two stages are two
data-parallel copies of each. The embedding of the first stage is the last one's output matrix as well.
"""

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # from a checkout where megazero is not installed

import megazero  # noqa: E402
from megazero.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # noqa: E402

TEXT = ROOT / "data" / "austen" / "austen.jsonl"
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,  # micro-batches that go through the stages in each step
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 5,
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(F.gelu(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    text = "".join(json.loads(line)["text"] for line in TEXT.read_text().splitlines()[:20]).encode()
    samples = [torch.tensor(list(text[i:j] + text[j : j + 1])) for i, j in pairwise(range(0, len(text) - 1, 64))]
    embedding = TiedLayerSpec("embedding", nn.Embedding, 256, 64)
    output = TiedLayerSpec("embedding", nn.Embedding, 256, 64, forward_fn=lambda tied, x: F.linear(x, tied.weight) / 8)
    layers = [embedding, *(LayerSpec(Block, 64) for _ in range(4)), LayerSpec(nn.LayerNorm, 64), output]
    loss_fn = nn.CrossEntropyLoss()
    model = PipelineModule(
        layers, num_stages=asked.stages, loss_fn=lambda x, labels: loss_fn(x.flatten(0, 1), labels.flatten())
    )
    data = [(sample[:-1], sample[1:]) for sample in samples]
    engine, *_ = megazero.initialize(model=model, config=CONFIG, training_data=data)
    for _ in range(asked.steps):
        loss = engine.train_batch()
    if engine.global_rank == 0:
        print(f"stages {engine.num_stages}, loss {loss:.4f}")


if __name__ == "__main__":
    main()
