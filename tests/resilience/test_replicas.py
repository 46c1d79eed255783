"""A bit that flips in what one of several ranks holds is found at the next comparison; rank and tensor are named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megazero.errors import DivergenceError
from megazero.resilience.replicas import checksum
from tests.engine.tiny import open_run, tiny, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def test_any_flipped_bit_changes_the_sum() -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(1))
    before = int(checksum(values))
    for bit in range(32):
        values.view(torch.int32)[17] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
        assert int(checksum(values)) != before
        values.view(torch.int32)[17] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)


def run_with_a_flip(settings: dict, rank: int | None, name: str) -> tuple[int, str]:
    """(the last step, the error) of a run in which a bit of a weight flips on one rank after step 2."""
    engine, source, _ = open_run(settings)
    try:
        with engine:
            while engine.running():
                engine.train_batch(source)
                if engine.step == 2 and int(os.environ["RANK"]) == rank:
                    engine.stage.sharded.rest()  # a gather that is under way might write the old bits over it
                    for block in engine.stage.sharded.trained:
                        for first, _, piece, _ in block.layout.pieces(*block.owned):
                            if piece.name == name:
                                block.owned_state("weight")[first - block.owned[0]].view(torch.int32).bitwise_xor_(
                                    1 << 15
                                )
    except DivergenceError as error:
        return engine.step, str(error)
    return engine.step, ""


WEIGHT, NORM = "layers.1.mlp.up.weight", "layers.1.attention_norm.weight"


@pytest.mark.parametrize(
    ("world", "changes", "rank", "name", "words"),
    [
        (4, {}, 2, WEIGHT, f"step 4: weight of {WEIGHT} on rank 2 is not that of the others"),
        (2, {}, 1, WEIGHT, f"step 4: weight of {WEIGHT} differs between ranks 0, 1"),
        (2, {"parallel.tp": 2}, 0, NORM, f"step 4: weight of {NORM} differs between ranks 0, 1"),
        (4, {"zero.stage": 1, "zero.mics_shard_size": 2}, 3, WEIGHT, f"weight of {WEIGHT} differs between ranks 1, 3"),
    ],
)
def test_a_flipped_bit_is_named(
    ranks: Callable, corpus: Path, world: int, changes: dict, rank: int, name: str, words: str
) -> None:
    settings = tiny(corpus, {"watch.replica_interval": 4, "train.micro_batch_size": 2, **changes})
    endings = ranks(world, run_with_a_flip, settings, rank, name)
    assert len(set(endings)) == 1
    assert endings[0][0] == 4 and words in endings[0][1], endings[0]


@pytest.mark.parametrize("changes", [{"parallel.tp": 2}, {"parallel.pp": 2, "zero.stage": 2}])
def test_nothing_is_found_where_nothing_flipped(ranks: Callable, corpus: Path, changes: dict) -> None:
    settings = tiny(corpus, {"watch.replica_interval": 2, "train.micro_batch_size": 2, **changes})
    assert set(ranks(4, run_with_a_flip, settings, None, WEIGHT)) == {(8, "")}
