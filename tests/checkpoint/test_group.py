"""Two real processes and gloo: both save, and what fails on one is an error on both."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from megazero.checkpoint import CheckpointWriter, TorchGroup, open_checkpoint, raise_together
from megazero.errors import CheckpointError
from megazero.sharding import Rectangle


def rank_main(rank: int, root: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    group = TorchGroup()
    writer = CheckpointWriter(Path(root) / "run", group)
    half = ("weight", "w", Rectangle((3 * rank,), (3,)), (6,), torch.full((3,), float(rank)))
    writer.save(1, [half], {"rank": torch.tensor(rank)}, {"from": rank})
    bad = half if rank == 0 else ("weight", "w", Rectangle((3,), (2,)), (6,), torch.zeros(2))
    outcomes = []
    for action in (lambda: writer.save(2, [bad]), lambda: raise_together(group, ValueError("no") if rank else None)):
        try:
            action()
        except CheckpointError as error:
            outcomes.append(str(error))
    (Path(root) / f"outcome{rank}").write_text("\n".join(outcomes))
    dist.destroy_process_group()


def test_two_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.start_processes(rank_main, (str(tmp_path),), nprocs=2, start_method="fork")
    with open_checkpoint(tmp_path / "run") as checkpoint:
        assert checkpoint.step == 1 and checkpoint.meta == {"from": 0}
        assert checkpoint.read("weight", "w").tolist() == [0.0] * 3 + [1.0] * 3
        assert [int(checkpoint.rank_state(rank)["rank"]) for rank in range(2)] == [0, 1]
    outcomes = [(tmp_path / f"outcome{rank}").read_text().split("\n") for rank in range(2)]
    assert outcomes[0] == outcomes[1]
    assert "weight of w: nobody saves" in outcomes[0][0] and outcomes[0][1] == "no (rank 1 of 2)"
