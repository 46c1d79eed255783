"""P3 and P4, and P1 over bucket sizes: what a rank keeps and sends, counted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist

from megazero import comm
from megazero.models.config import ModelConfig
from tests.distributed import runs
from tests.distributed.runs import Layout, TokenSource, make_engine, random_weights, settings, train

GPT2 = {
    "num_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 37,
    "max_position_embeddings": 24,
}


def model_state_bytes(tree: dict[str, Any]) -> dict[str, float]:
    """Bytes of the storages behind parameters, gradients and optimizer state, at the end of a step's last backward."""
    with make_engine(tree) as engine:
        found: dict[str, float] = {}
        run = engine.optimizer.run

        def counting(*args):
            blocks = engine.stage.sharded.blocks
            tensors = list(engine.stage.model.parameters())
            tensors += [p.grad for p in engine.stage.model.parameters() if p.grad is not None]
            for block in blocks:
                tensors += [value for value in vars(block).values() if isinstance(value, torch.Tensor)]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
            found["bytes"] = sum(storages.values())
            found["layout"] = sum(block.layout.numel for block in blocks)
            found["parameters"] = sum(p.numel() for p in set(engine.stage.model.parameters()))
            found["slack"] = sum(64 * (len(block.layout.entries) + block.layout.shards) for block in blocks)
            return run(*args)

        engine.optimizer.run = counting
        engine.train_batch(TokenSource(37, 12))
        return found


@pytest.mark.parametrize("layout", [(1, 1, 2), (2, 2, 1), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("precision", "grad_dtype"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_p3_model_state_is_what_the_layout_says(
    ranks: Callable, layout: Layout, zero: int, precision: str, grad_dtype: str
) -> None:
    """bf16: 2 + g + 12 bytes a parameter, the 12 divided by N in stage 1; float32 is its own master: 4 + g + 8."""
    fields = {"precision": precision, "grad_dtype": grad_dtype, "steps": 1, "micro_batch_size": 4 // layout[2]}
    tree = settings(GPT2, layout, zero={"stage": zero}, train=fields, optimizer={"warmup_steps": 0})
    shards = layout[2] if zero else 1
    parameter, state = (2, 12) if precision == "bf16" else (4, 8)
    per_element = parameter + (2 if grad_dtype == "bf16" else 4) + state / shards
    for found in ranks(math.prod(layout), model_state_bytes, tree):
        assert found["bytes"] == found["layout"] * per_element
        assert found["parameters"] <= found["layout"] <= found["parameters"] + found["slack"]


def traffic_of_a_step(tree: dict[str, Any]) -> tuple[Counter, Counter, Counter, int, int]:
    """Of the second step: the communicator's calls and elements, what torch was truly called for, Ψ and the blocks."""
    with make_engine(tree) as engine:
        source, dp = TokenSource(37, 12), engine.stage.sharded.dp
        engine.train_batch(source)
        calls, elements = dp.calls.copy(), dp.elements.copy()
        truly: Counter[str] = Counter()

        def counted(name: str, function: Callable, whole: int) -> Callable:
            def call(*args, **kwargs):
                if args[whole].dtype == torch.float64:
                    truly["step sums"] += args[whole].numel()
                elif kwargs.get("group") is dp.group:
                    truly[name] += args[whole].numel()
                return function(*args, **kwargs)

            return call

        kept = comm._all_gather, comm._reduce_scatter, dist.all_reduce
        comm._all_gather = counted("all_gather", kept[0], 0)
        comm._reduce_scatter = counted("reduce_scatter", kept[1], 1)
        dist.all_reduce = counted("all_reduce", kept[2], 0)
        try:
            engine.train_batch(source)
        finally:
            comm._all_gather, comm._reduce_scatter, dist.all_reduce = kept
        blocks = engine.stage.sharded.blocks
        return dp.calls - calls, dp.elements - elements, truly, sum(b.layout.numel for b in blocks), len(blocks)


@pytest.mark.parametrize(
    ("layout", "micro_batch_size"), [((1, 1, 2), 2), ((1, 1, 2), 1), ((2, 1, 2), 1)], ids=["m1", "m2", "tp2-m2"]
)
@pytest.mark.parametrize("bucket", [1, 500_000_000], ids=["a_block_each", "one_bucket"])
@pytest.mark.parametrize("zero", [0, 1])
def test_p4_elements_per_step(ranks: Callable, layout: Layout, zero: int, bucket: int, micro_batch_size: int) -> None:
    """Stage 0: an all-reduce of Ψ, that is 2Ψ(N-1)/N a rank; stage 1: a reduce-scatter and an all-gather of Ψ.

    Besides, one all-reduce of norm, loss, tokens and stop flag together.
    """
    tree = settings(
        GPT2,
        layout,
        zero={"stage": zero, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket},
        train={"micro_batch_size": micro_batch_size},
    )
    for calls, elements, truly, psi, blocks in ranks(math.prod(layout), traffic_of_a_step, tree):
        buckets = blocks if bucket == 1 else 1
        kinds = ("reduce_scatter", "all_gather") if zero else ("all_reduce",)
        assert elements == {kind: psi for kind in kinds}
        assert calls == {kind: buckets for kind in kinds}
        assert truly == {**elements, "step sums": 4}
        moved = sum(n * (2 if kind == "all_reduce" else 1) for kind, n in elements.items())
        assert moved == 2 * psi


@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 2)], ids=str)
def test_p1_buckets_and_stages_change_no_bit(layout: Layout) -> None:
    source, weights = TokenSource(37, 12), random_weights(ModelConfig(**GPT2))
    outcomes = []
    for zero in (0, 1):
        for bucket in (1, 1000, 500_000_000):
            sizes = {"stage": zero, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
            outcomes.append(train(settings(GPT2, layout, zero=sizes), source, weights, dp=2))
    first = outcomes[0]
    for other in outcomes[1:]:
        assert (other.losses, other.norms) == (first.losses, first.norms)
        for kind in runs.KINDS:
            assert all(torch.equal(other.state[kind][name], value) for name, value in first.state[kind].items())
