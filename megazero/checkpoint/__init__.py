"""Checkpoints that know no layout: boxes of global tensors, one safetensors file per rank, one manifest.

writer = CheckpointWriter(root, group, keep=3, start_step=resumed_step)     # every rank
writer.save(step, chunks, rank_state, meta)
with open_checkpoint(newest(root)) as checkpoint:
    checkpoint.check_matches(parameters)
    checkpoint.verify(boxes)
    checkpoint.read("weight", name, box)
"""

from __future__ import annotations

from megazero.checkpoint.group import Group, OneProcess, TorchGroup, raise_together
from megazero.checkpoint.locate import newest, newest_or_none
from megazero.checkpoint.reader import Checkpoint, open_checkpoint
from megazero.checkpoint.writer import CheckpointWriter, ChunkData, save

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "ChunkData",
    "Group",
    "OneProcess",
    "TorchGroup",
    "newest",
    "newest_or_none",
    "open_checkpoint",
    "raise_together",
    "save",
]
