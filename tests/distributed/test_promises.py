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
            engine.stage.sharded.wait_for_gradients()
            blocks = engine.stage.sharded.blocks
            tensors = list(engine.stage.model.parameters())
            tensors += [p.grad for p in engine.stage.model.parameters() if p.grad is not None]
            for block in blocks:
                held = (*vars(block).values(), *vars(block.gradient).values())
                tensors += [value for value in held if isinstance(value, torch.Tensor)]
                tensors += block.optimizer_state.values()
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
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("precision", "grad_dtype"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_p3_model_state_is_what_the_layout_says(
    ranks: Callable, layout: Layout, zero: int, precision: str, grad_dtype: str
) -> None:
    """bf16: 2 + g + 12 bytes a parameter, divided by N one after the other; float32 is its own master: 4 + g + 8."""
    fields = {"precision": precision, "grad_dtype": grad_dtype, "steps": 1, "micro_batch_size": 4 // layout[2]}
    sizes = {"stage": zero, "stage3_param_persistence_threshold": 0}
    tree = settings(GPT2, layout, zero=sizes, train=fields, optimizer={"warmup_steps": 0})
    parameter, gradient, state = 2 if precision == "bf16" else 4, 2 if grad_dtype == "bf16" else 4, 8
    if precision == "bf16":
        state = 12
    cut = [layout[2] if zero >= stage else 1 for stage in (1, 2, 3)]
    per_element = state / cut[0] + gradient / cut[1] + parameter / cut[2]
    for found in ranks(math.prod(layout), model_state_bytes, tree):
        assert found["bytes"] == found["layout"] * per_element
        assert found["parameters"] <= found["layout"] <= found["parameters"] + found["slack"]


def traffic_of_a_step(tree: dict[str, Any]) -> tuple[Counter, Counter, Counter, int, int]:
    """Of the second step: the communicator's calls and elements, what torch was truly called for, Ψ and the blocks."""
    with make_engine(tree) as engine:
        source, dp = TokenSource(37, 12), engine.stage.sharded.groups.whole
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
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_p4_elements_per_step(ranks: Callable, layout: Layout, zero: int, bucket: int, micro_batch_size: int) -> None:
    """Stage 0: an all-reduce of Ψ, that is 2Ψ(N-1)/N a rank; stage 1: a reduce-scatter and an all-gather of Ψ; stage 2:
    a reduce-scatter for each micro-batch; stage 3: two all-gathers for each as well, a block at a time.

    Besides, one all-reduce of norm, loss, tokens and stop flag together.
    """
    sizes = {"stage": zero, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    tree = settings(
        GPT2,
        layout,
        zero={**sizes, "stage3_param_persistence_threshold": 0},
        train={"micro_batch_size": micro_batch_size},
    )
    m = 4 // (micro_batch_size * layout[2])
    for calls, elements, truly, psi, blocks in ranks(math.prod(layout), traffic_of_a_step, tree):
        buckets = blocks if bucket == 1 else 1
        passes = {
            0: {"all_reduce": (1, buckets)},
            1: {"reduce_scatter": (1, buckets), "all_gather": (1, buckets)},
            2: {"reduce_scatter": (m, buckets), "all_gather": (1, buckets)},
            3: {"reduce_scatter": (m, buckets), "all_gather": (2 * m, blocks)},
        }[zero]
        assert elements == {kind: times * psi for kind, (times, _) in passes.items()}
        assert calls == {kind: times * count for kind, (times, count) in passes.items()}
        assert truly == {**elements, "step sums": 4}
        moved = sum(n * (2 if kind == "all_reduce" else 1) for kind, n in elements.items())
        assert moved == {0: 2, 1: 2, 2: m + 1, 3: 3 * m}[zero] * psi


@pytest.mark.parametrize("micro_batch_size", [2, 1], ids=["m1", "m2"])
@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({"parallel": {"keep_gathered": True}}, lambda m: m + 1),
        ({"zero": {"reshard_after_forward": False}}, lambda m: 2 * m),
    ],
    ids=["keep_gathered", "no_reshard_after_forward"],
)
def test_p4_where_parameters_stay_gathered(
    ranks: Callable, fields: dict[str, Any], factor: Callable[[int], int], micro_batch_size: int
) -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **fields.get("zero", {})}
    tree = settings(
        GPT2,
        (1, 1, 2),
        zero=zero,
        parallel=fields.get("parallel", {}),
        train={"micro_batch_size": micro_batch_size},
    )
    for _, elements, _, psi, _ in ranks(2, traffic_of_a_step, tree):
        assert sum(elements.values()) == factor(2 // micro_batch_size) * psi


@pytest.mark.parametrize("layout", [(1, 2, 2)], ids=str)
def test_p1_buckets_and_stages_change_no_bit(layout: Layout) -> None:
    source, weights = TokenSource(37, 12), random_weights(ModelConfig(**GPT2))
    outcomes = []
    # With one micro-batch: with more, stages 2 and 3 add the ranks' gradients before the micro-batches', not after. And
    # with one kind of block: the norm is a sum over blocks.
    for zero in (0, 1, 2, 3):
        for bucket in (1, 1000, 500_000_000):
            sizes = {"stage": zero, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
            sizes["stage3_param_persistence_threshold"] = 0
            tree = settings(GPT2, layout, zero=sizes, train={"micro_batch_size": 2})
            outcomes.append(train(tree, source, weights, dp=2))
    first = outcomes[0]
    for other in outcomes[1:]:
        assert (other.losses, other.norms) == (first.losses, first.norms)
        for kind in runs.KINDS:
            assert all(torch.equal(other.state[kind][name], value) for name, value in first.state[kind].items())
