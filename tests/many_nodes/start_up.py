"""What grows with the number of ranks when a job starts, saves and resumes: one rank of 1,024 and of 16,384, a table.

    python tests/many_nodes/start_up.py

Groups are made over torch's fake process group, of which this rank alone exists; manifests are those of Llama-3 8B at
zero.stage 1, every rank's entries from its ShardSpecs; the sample order is that of eight datasets of a trillion tokens.
"""

from __future__ import annotations

import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path[0] = str(Path(__file__).resolve().parents[2])

from data.sample_order import SampleOrder  # noqa: E402
from megazero.checkpoint import Checkpoint, manifest  # noqa: E402
from megazero.checkpoint.writer import _assemble  # noqa: E402
from megazero.config import Config  # noqa: E402
from megazero.layout import AXES, Layout  # noqa: E402
from megazero.planner.dry_run import _alone  # noqa: E402
from megazero.planner.model_state import StageBuffers, stage_buffers  # noqa: E402
from megazero.sharding import is_counted  # noqa: E402
from megazero.topology import Topology  # noqa: E402

WORLDS = {1024: {"tp": 8, "pp": 8}, 16384: {"tp": 8, "pp": 16}}
KINDS = ("weight", "exp_avg", "exp_avg_sq")
Found = dict[str, float]


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and the seconds of this thread that it took: others may use the machine."""
    begin = time.thread_time()
    return work(), time.thread_time() - begin


def groups(layout: Layout, rank: int) -> Found:
    with _alone(rank, layout.world_size):
        topology, seconds = timed(lambda: Topology(layout, rank, torch.device("cpu")))
        mine = [topology.group(axis) for axis in AXES]
        sizes = [dist.get_world_size(group) for group in mine if group is not None]
    return {"groups: seconds": seconds, "groups: members of this rank's, together": sum(sizes)}


def saved(config: Config, layout: Layout) -> list[tuple[manifest.RankFile, dict[str, tuple[int, ...]]]]:
    """What every rank hands to rank 0, with checksums out of the air."""
    draw, found = random.Random(1), []
    buffers: dict[tuple[int, int], StageBuffers] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        if (at["pp"], at["tp"]) not in buffers:
            buffers[at["pp"], at["tp"]] = stage_buffers(config, config.model.architecture, layout, rank)
        chunks, shapes, start, name = [], {}, 4096, f"rank_{rank:05d}.safetensors"
        for kind in KINDS:
            for buffer in buffers[at["pp"], at["tp"]].all:
                for _, piece, box in buffer.layout.boxes(*buffer.layout.shard(at["dp"])):
                    if is_counted(piece, at):
                        shapes[piece.name] = piece.global_shape
                        chunks.append(manifest.Chunk(name, kind, piece.name, box, start, draw.getrandbits(32)))
                        start += chunks[-1].size
        state = manifest.StateTensor("state/rng_cpu", "U8", (5056,), start, draw.getrandbits(32))
        found.append((manifest.RankFile(name, start + 5056, draw.getrandbits(32), tuple(chunks), (state,)), shapes))
    return found


def manifests(config: Config, layout: Layout) -> Found:
    gathered = saved(config, layout)
    contents, assemble = timed(lambda: _assemble(1, {}, gathered))
    encoded, encode = timed(lambda: manifest.encode(contents))
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / manifest.NAME).write_bytes(encoded)
        _, decode = timed(lambda: manifest.read(Path(directory)))
        checkpoint, index = timed(lambda: Checkpoint(Path(directory), contents))
        own = [(c.kind, c.name, c.box) for c in contents.files[layout.world_size // 2].chunks]
        _, find = timed(lambda: [checkpoint._sources(*box) for box in own])
    return {
        "manifest: MB": len(encoded) / 1e6,
        "manifest: boxes of a rank": sum(len(file.chunks) for file in contents.files) / layout.world_size,
        "rank 0, a save: puts it together, seconds": assemble + encode,
        "every rank, a resume: reads it, seconds": decode + index,
        "every rank, a resume: finds its own boxes, seconds": find,
    }


def sample_order(layout: Layout) -> Found:
    order = SampleOrder([10**12] * 8, [1.0, 2, 3, 4, 5, 6, 7, 8], 4096, 1, True)
    first, size = 10**9, 4
    mine = first + (np.arange(size) * layout.dp + layout.dp // 2)
    _, seconds = timed(lambda: [order.locate(mine) for _ in range(100)])
    return {"sample order: this rank's 4 samples of a step, milliseconds": seconds * 10}


def main() -> None:
    torch.set_num_threads(1)
    columns: dict[int, Found] = {}
    for world, parallel in WORLDS.items():
        tree = {"model": {"preset": "llama3-8b"}, "parallel": parallel, "zero": {"stage": 1}}
        tree |= {"data": {"seq_length": 4096}, "train": {"global_batch_size": 4096}}
        config = Config.from_dict(tree, world_size=world)
        layout = config.layout(world)
        columns[world] = groups(layout, world // 2) | manifests(config, layout) | sample_order(layout)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        columns[world]["memory of this process, all ranks' entries in it, GB"] = peak
    small, large = columns.values()
    print("| | 1,024 ranks | 16,384 ranks | times |\n|---|---|---|---|")
    for name, value in small.items():
        print(f"| {name} | {value:.3g} | {large[name]:.3g} | {large[name] / value:.1f} |")


if __name__ == "__main__":
    main()
