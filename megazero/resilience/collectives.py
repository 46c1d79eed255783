"""The collectives that a rank has entered, group by group, from torch's flight recorder: gloo's and NCCL's.

The recorder notes each collective in C++ as it is issued, so that nothing is added to a step. Transfers between two
ranks are left to the position in the step: gloo's are not noted.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_ENTRIES = "2000"
_SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


class Entered(NamedTuple):
    """One group on one rank. ``last``: number of the last collective that the rank entered. ``waits``: that of the
    first that is not done there, and ``operation`` what it is; 0 and "" where none is under way."""

    group: str
    ranks: tuple[int, ...]
    last: int
    waits: int = 0
    operation: str = ""


def record_collectives() -> None:
    """Have torch's recorder on; to be called before any process group is made."""
    if not any(name in os.environ for name in _SIZE_VARIABLES):
        os.environ["TORCH_FR_BUFFER_SIZE"] = _ENTRIES


def entered(since: int) -> list[Entered]:
    """This rank's groups, as far as the recorder remembers them from ``since`` on, by time.time_ns(): it also remembers
    the groups of a process group that was destroyed, whose names are given again."""
    names = {}
    world = dist.distributed_c10d._world
    for group, ranks in world.pg_group_ranks.items():
        if isinstance(group, dist.ProcessGroup):
            names[world.pg_names[group]] = (group.group_desc, tuple(sorted(ranks)))
    found: dict[str, Entered] = {}
    for entry in _entries():
        if entry["is_p2p"] or entry["time_created_ns"] < since:
            continue  # two ranks count these apart from the others; the position in the step knows them
        name = entry["process_group"][0]
        description, ranks = names.get(name, (entry["process_group"][1], ()))
        before = found.get(name, Entered(_plain(description), ranks, 0))
        if entry["retired"]:
            # A group's collectives end in order, so that what came before is over, even where that is not noted.
            waits, operation = 0, ""
        else:
            waits, operation = before.waits, before.operation
            if not waits and entry["state"] != "completed":
                started = ", started on the device" if entry["state"] == "started" else ""
                waits = entry["collective_seq_id"]
                operation = entry["profiling_name"].partition(":")[2] + started
        last = max(before.last, entry["collective_seq_id"])
        found[name] = before._replace(last=last, waits=waits, operation=operation)
    return list(found.values())


def _plain(description: str) -> str:
    """mesh_dp, default_pg: as users of megazero call them."""
    return {"default_pg": "world", "undefined": "pair"}.get(description, description.removeprefix("mesh_"))


def _entries() -> list[dict[str, Any]]:
    """What both recorders hold, oldest first."""
    entries: dict[tuple, dict[str, Any]] = {}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is None:
            continue
        for entry in json.loads(dump(True, False)).get("entries", []):
            entries[(*entry["process_group"], entry["profiling_name"], entry["record_id"])] = entry
    return sorted(entries.values(), key=lambda entry: entry["time_created_ns"])
