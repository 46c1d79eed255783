"""What is looked at before any weight is made: that all ranks run the same thing on the same files, and that the links
between them work.

A few numbers are compared by one reduction, whatever the number of ranks; names are gathered only where something is
wrong. Links are measured where the job has several machines.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from megazero.config import Config
from megazero.errors import LaunchError
from megazero.resilience import paths
from megazero.topology import Topology

_LINK_BYTES = 16 * 2**20
_ROUNDS = 3
_SLOW = 2.0
"""A link is named that is slower than the median of its kind by this factor."""
_INFINIBAND, _NETWORKS = Path("/sys/class/infiniband"), Path("/sys/class/net")


def preflight(config: Config, topology: Topology, step: int = 0) -> list[str]:
    """What the user should know, in lines. Raises LaunchError, the same on every rank, where ranks are not alike, a
    machine lacks the interface that NCCL or gloo is told to use, or paths are not what a run from ``step`` on needs.
    Every rank calls it."""
    if topology.layout.world_size == 1:
        problem, warning = paths.room(config, step)
        if problem:
            raise LaunchError(f"rank 0 on {socket.gethostname()}: {problem}")
        return [warning] if warning else []
    problem = missing_interface(os.environ, _NETWORKS)
    facts = {
        "problem": problem or "",
        "megazero's code": code_hash(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "the settings": _settings(config),
        "the device": _device(topology.device),
    }
    _check_alike(facts, topology)
    warnings = (_check_paths(config, topology, step), disabled_infiniband(os.environ, _INFINIBAND))
    messages = [warning for warning in warnings if warning]
    if topology.device.type == "cuda" and dist.get_backend() == "nccl":
        messages.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {_device(topology.device)}")
    if not _equal({"host": socket.gethostname()}, topology)[0]:
        messages += _links(topology)
    return messages


def _check_paths(config: Config, topology: Topology, step: int) -> str:
    """A warning, "" for none."""
    place, problem, warning = config.checkpoint.dir, "", ""
    probe = paths.write_probe(place, topology) if place is not None else None
    try:
        if place is not None and probe is not None:
            problem = paths.local_problem(place, probe) or paths.writable_problem(place)
        if not problem:
            problem, warning = paths.room(config, step)
    except OSError as error:
        problem = f"checkpoint.dir = {place}: {error}"
    try:
        _check_alike({"problem": problem, **paths.data_facts(config)}, topology)
    finally:
        if probe is not None:
            paths.remove_probe(probe, topology)
    return warning


def _check_alike(facts: Mapping[str, str], topology: Topology) -> None:
    # Where all have one and the same problem they are alike, and everybody knows of it.
    if all(_equal(facts, topology)) and not facts["problem"]:
        return
    everyone: list[Mapping[str, str]] = [{}] * topology.layout.world_size
    dist.all_gather_object(everyone, {**facts, "host": socket.gethostname()})
    for rank, theirs in enumerate(everyone):
        if theirs["problem"]:
            raise LaunchError(f"rank {rank} on {theirs['host']}: {theirs['problem']}")
    for name in facts:
        values = [theirs[name] for theirs in everyone]
        if len(set(values)) > 1:
            common = max(dict.fromkeys(values), key=values.count)
            odd = next(rank for rank, value in enumerate(values) if value != common)
            where = [
                f"{values[rank]} on rank {rank} ({everyone[rank]['host']})" for rank in (odd, values.index(common))
            ]
            raise LaunchError(f"{name}: not the same on all machines: {where[0]}, {where[1]}; make them equal")


def _equal(facts: Mapping[str, str], topology: Topology) -> list[bool]:
    """For each fact, whether all ranks have the same."""
    own = torch.tensor([_number(value) for value in facts.values()], dtype=torch.int64, device=topology.device)
    bounds = torch.cat((own, -own))
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    high, negative_low = bounds.chunk(2)
    return (high == -negative_low).tolist()


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


@functools.cache
def code_hash() -> str:
    """Of every source file of the package, by name and content."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _settings(config: Config) -> str:
    """Of all but places: those of logs may differ from rank to rank, and a path may have two names."""
    places = {"jsonl", "events", "tensorboard", "wandb", "timeline"}
    told = config.model_dump_json(exclude={"log": places, "checkpoint": {"dir", "resume"}})
    return hashlib.sha256(told.encode()).hexdigest()[:12]


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def missing_interface(environment: Mapping[str, str], networks: Path) -> str | None:
    """What is wrong with NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME here. ``networks``: a folder with one entry each."""
    there = sorted(path.name for path in networks.iterdir()) if networks.is_dir() else []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environment.get(variable, "")
        # ^ leaves out, = means the whole name; NCCL takes a bare name for a prefix, gloo does not.
        if not value or value.startswith("^") or not there:
            continue
        exact = value.startswith("=") or variable.startswith("GLOO")
        fits: Callable[[str, str], bool] = str.__eq__ if exact else str.startswith
        if not any(fits(name, wanted) for wanted in value.lstrip("=").split(",") for name in there):
            return f"{variable}={value}: this machine has no such interface; it has {', '.join(there)}"
    return None


def disabled_infiniband(environment: Mapping[str, str], devices: Path) -> str | None:
    """A warning where InfiniBand is there and switched off."""
    if environment.get("NCCL_IB_DISABLE") == "1" and devices.is_dir() and any(devices.iterdir()):
        names = ", ".join(sorted(path.name for path in devices.iterdir()))
        return (
            f"warning: NCCL_IB_DISABLE=1, and there is InfiniBand here ({names}): NCCL will use sockets, which are slow"
        )
    return None


def _links(topology: Topology) -> list[str]:
    """Measure every rank's link to the next one, all at once, and name the slow ones."""
    rank, size, device = topology.rank, topology.layout.world_size, topology.device
    seconds = torch.zeros(2, size, dtype=torch.float64, device=device)
    sent = torch.ones(_LINK_BYTES // 4, dtype=torch.float32, device=device)
    received = torch.empty_like(sent)
    best = float("inf")
    for _ in range(_ROUNDS):
        dist.barrier()
        begin = time.perf_counter()
        operations = [
            dist.P2POp(dist.isend, sent, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    seconds[0, rank], seconds[1, rank] = best, float(_number(socket.gethostname()) % 2**50)
    dist.all_reduce(seconds)
    times, hosts = seconds.tolist()
    return slow_links(times, hosts, _LINK_BYTES)


def slow_links(times: list[float], hosts: list[float], size: int) -> list[str]:
    """``times``: seconds in which each rank got ``size`` bytes from the one before it; ``hosts``: a number each."""
    lines = []
    for kind, crosses in (("within a machine", False), ("between machines", True)):
        found = {rank: t for rank, t in enumerate(times) if (hosts[rank - 1] != hosts[rank]) is crosses}
        if not found:
            continue
        median = sorted(found.values())[(len(found) - 1) // 2]
        lines.append(f"links {kind}: {size / median / 1e9:.3g} GB/s (median of {len(found)}, all at once)")
        for rank, taken in found.items():
            if taken > _SLOW * median:
                before = (rank - 1) % len(times)
                lines.append(f"slow link: rank {before} to rank {rank}, {size / taken / 1e9:.3g} GB/s")
    return lines
