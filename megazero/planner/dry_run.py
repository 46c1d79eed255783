"""One rank of a layout of any size, built and run without the hardware: what it holds and what it sends, counted.

The rank goes through the engine's own building, sharding, schedule and optimizer, with tensors that have shapes but no
values (torch's meta device) and process groups of which only this rank exists (torch's fake backend). It takes two
steps; the second is counted. Of many micro-batches the first two and the last are run, and those between counted as the
second is: they differ in nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.build import DTYPES, build_stage
from megazero.config import Config
from megazero.errors import LaunchError
from megazero.layout import Layout
from megazero.optim.step import OptimizerStep
from megazero.pipeline.executor import Executor
from megazero.pipeline.p2p import Receipt, Transfers
from megazero.pipeline.schedules import Schedule, build_schedule
from megazero.planner.activations import kernels
from megazero.planner.model_state import model_state, stage_buffers
from megazero.planner.offload import block_shares, moved
from megazero.planner.paper_tier import PaperTier
from megazero.planner.step_time import stage_counts
from megazero.planner.traffic import Route, Traffic, check_planned, gathers, group_name, step_traffic
from megazero.stage import DecoderStage, MicroBatch
from megazero.topology import Topology
from megazero.zero.offload.settings import Offload
from megazero.zero.offload.sizes import BlockShare, host_state
from megazero.zero.sharded import ShardedModel


@dataclass(frozen=True)
class Account:
    """One rank's bytes of model state and traffic per step, counted or planned. ``state``: on the device; ``host``: in
    host memory, ``files``: in files, what the update and the copies work in included."""

    state: int
    traffic: Traffic
    host: int = 0
    files: int = 0


def planned(config: Config, world_size: int, rank: int) -> Account:
    """What the planner says of one rank of GPUs. Raises ConfigError where the layout does not fit."""
    check_planned(config)
    layout, model = config.layout(world_size), config.model.architecture
    pp_rank, buffers = layout.coordinates(rank)["pp"], stage_buffers(config, model, layout, rank)
    precision, grads = kernels(config, gpu=True).precision, config.train.grad_dtype
    stage, offload, micro_batches = config.zero.stage, Offload.of(config.zero), config.micro_batches(layout.dp)
    dp_rank = layout.coordinates(rank)["dp"]
    state = model_state(buffers.all, dp_rank, stage, precision, grads, offload, micro_batches > 1)
    counts = stage_counts(config, model)
    chunks = [(counts[i], i == 0, i == len(counts) - 1) for i in range(pp_rank, len(counts), layout.pp)]
    actions = _schedule(config, layout)[pp_rank]
    traffic = step_traffic(config, model, layout, rank, buffers, chunks, actions)
    if not offload.active:
        return Account(state.total, traffic)
    shares = block_shares(buffers.all, stage, precision, grads, offload)
    host = host_state(shares, offload, gpu=True)
    link = moved(shares, stage, offload, micro_batches, gathers(config, micro_batches))
    # A slice that is all padding is read, and not changed.
    owned = [bool(buffer.layout.group_ranges(*buffer.layout.shard(dp_rank))) for buffer in buffers.all]
    written = host_state(list(compress(shares, owned)), offload, gpu=True).files
    padding = [share for share, own in zip(shares, owned, strict=True) if not (own or share.values_leave)]
    still = moved(padding, stage, offload, 1, 0).back
    beside = {("host", "out"): link.out, ("host", "back"): link.back - still}
    unchanged = sum(share.numel * share.value for share, own in zip(shares, owned, strict=True) if _keeps(share, own))
    written += link.written - (unchanged if link.written else 0)
    beside |= {("files", "read"): host.files + link.fetched, ("files", "write"): written}
    traffic.update({Route(*names, 1): size for names, size in beside.items() if size})
    return Account(state.total, traffic, host.memory, host.on_disk)


def _keeps(share: BlockShare, owned: bool) -> bool:
    """Whether its values in a file are not written anew: the host updates it, and it is padding alone."""
    return share.values_leave and share.state_leaves and not owned


def dry_run(config: Config, world_size: int, rank: int) -> Account:
    """What a rank of GPUs holds and sends, counted.

    Raises ConfigError where the layout does not fit, LaunchError where this process is in a process group already.
    """
    check_planned(config)
    layout, model = config.layout(world_size), config.model.architecture
    precision = kernels(config, gpu=True).precision
    train = config.train.model_copy(update={"compile": False, "precision": precision})
    config = config.model_copy(update={"train": train})
    with alone(rank, world_size):
        topology, counter = Topology(layout, rank, torch.device("meta")), CollectiveCounter(layout, rank)

        def make_tier(offload: Offload, device: torch.device, shares: Sequence[BlockShare]) -> PaperTier:
            return PaperTier(offload, host_state(shares, offload, gpu=True), counter.traffic)

        stage = build_stage(config, model, topology, DTYPES[precision], make_tier)
        optimizer = OptimizerStep(stage.sharded, topology, config.optimizer, config.train, fp16=precision == "fp16")
        size = config.train.micro_batch_size * config.data.seq_length
        shape = (stage.tp.local_tokens(size), model.hidden_size)
        transfers = _Counted(counter, shape, DTYPES[precision]) if layout.pp > 1 else None
        actions = _schedule(config, layout)[topology.coordinates["pp"]]
        count = config.micro_batches(layout.dp)
        micro_batches = [(index, _micro_batch(config)) for index in range(count)]
        for run in ({count - 1}, {0, 1, count - 1}):
            counter.traffic.clear()
            held = Held(stage.sharded)
            executor = Executor(_Representative(stage, held, counter.traffic, run, DTYPES[precision]), transfers)
            with counter:
                executor.run(actions, micro_batches, on_loss=lambda loss: None)
                stage.sharded.finish_gradients()
                held.look()
                loss = torch.zeros((), dtype=torch.float64, device="meta")
                optimizer.run(1, 0.0, loss, 1.0, 1, stop=False)
        traffic = Counter({route: count for route, count in counter.traffic.items() if count})
        tier = stage.sharded.tier
        if not isinstance(tier, PaperTier):
            return Account(held.bytes, traffic)
        return Account(held.bytes, traffic, tier.memory.taken, tier.files)


def _schedule(config: Config, layout: Layout) -> Schedule:
    count = config.micro_batches(layout.dp)
    return build_schedule(config.schedule, layout.pp, count, config.parallel.virtual_pp)


def _micro_batch(config: Config) -> dict[str, torch.Tensor]:
    """Shapes as a batch source gives them."""
    size, length = config.train.micro_batch_size, config.data.seq_length
    micro_batch = {
        "tokens": torch.empty(size, length + 1, dtype=torch.int64, device="meta"),
        "weights": torch.empty(size, length, device="meta"),
        "samples": torch.empty(size, dtype=torch.int64, device="meta"),
    }
    if config.data.reset_at_document:
        for name in ("positions", "documents"):
            micro_batch[name] = torch.empty(size, length, dtype=torch.int64, device="meta")
    return micro_batch


class Held:
    """Bytes of every storage on the device that the blocks and the optimizer hold, of each block at the moment when it
    holds most. That is the end of the step's last backward; but gradients that leave are gone by then, and those that
    micro-batches have added up whole (below stage 2) are there when it begins."""

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded, self._most = sharded, [0] * len(sharded.blocks)

    @property
    def bytes(self) -> int:
        return sum(self._most)

    def begin_backward(self) -> None:
        if self._sharded.tier is not None and not self._sharded.sharding.gradients:
            self.look()

    def look(self) -> None:
        tier = self._sharded.tier
        elsewhere = tier.memory.storages if isinstance(tier, PaperTier) else set()
        for index, block in enumerate(self._sharded.blocks):
            storages = {}
            for held in (*vars(block).values(), *vars(block.gradient).values(), *block.optimizer_state.values()):
                if isinstance(held, torch.Tensor):
                    storages[held.untyped_storage()._cdata] = held.untyped_storage().nbytes()
            size = sum(size for storage, size in storages.items() if storage not in elsewhere)
            self._most[index] = max(self._most[index], size)


class _Agreeing(FakeStore):
    """The store of a rank that is alone: whatever it waits for is there, and the others say what it says."""

    def __init__(self) -> None:
        super().__init__()
        self._said = b""

    def set(self, key: str, value: str | bytes) -> None:
        self._said = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        return self._said

    def add(self, key: str, amount: int) -> int:
        return amount

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None: ...

    def deleteKey(self, key: str) -> bool:  # the name that torch asks for
        return True


@contextmanager
def alone(rank: int, world_size: int) -> Iterator[None]:
    """A process group of ``world_size`` of which this rank alone exists; its collectives move nothing."""
    if dist.is_initialized():
        raise LaunchError("a dry run makes process groups of its own: run it in a process that is in none")
    store = _Agreeing()  # torch does not keep the Python half of it alive
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()
        del store


class _Representative:
    """A stage that runs the micro-batches of ``run``, and counts the others' traffic as micro-batch 1's.

    Micro-batch 1 comes before those that are not run in every pass of every schedule.
    """

    def __init__(self, stage: DecoderStage, held: Held, traffic: Traffic, run: set[int], dtype: torch.dtype) -> None:
        self._stage, self._held, self._traffic, self._run, self._dtype = stage, held, traffic, run, dtype
        self._seen: dict[tuple[str, int], Traffic] = {}  # of micro-batch 1's pass, by kind and chunk
        self._passes: dict[int, tuple[int, torch.Tensor | None]] = {}  # by the output's id: micro-batch and input
        self.gather, self.reduce = stage.gather, stage.reduce

    def forward(self, micro_batch: tuple[int, MicroBatch], x: torch.Tensor | None, chunk: int) -> torch.Tensor:
        index, tensors = micro_batch
        if self._runs("forward", index, chunk):
            with self._noted("forward", index, chunk):
                output = self._stage.forward(tensors, x, chunk)
        elif self._stage.model.head is not None and chunk == len(self._stage.chunks) - 1:
            output = torch.empty((), device="meta")
        else:
            rows = self._stage.tp.local_tokens(tensors["weights"].numel())
            output = torch.empty(rows, self._stage.model.config.hidden_size, dtype=self._dtype, device="meta")
        self._passes[id(output)] = (index, x)
        return output

    def backward(self, output: torch.Tensor, gradient: torch.Tensor | None, chunk: int) -> None:
        index, x = self._passes.pop(id(output))
        if self._runs("backward", index, chunk):
            self._held.begin_backward()
            with self._noted("backward", index, chunk):
                self._stage.backward(output, gradient, chunk)
        elif x is not None:
            x.grad = torch.empty_like(x)

    def _runs(self, kind: str, index: int, chunk: int) -> bool:
        if index not in self._run:
            self._traffic.update(self._seen.get((kind, chunk), {}))
        return index in self._run

    @contextmanager
    def _noted(self, kind: str, index: int, chunk: int) -> Iterator[None]:
        before = Counter(self._traffic)
        yield
        if index == 1:
            self._seen[kind, chunk] = self._traffic - before


class _Counted(Transfers):
    """Transfers that are counted and not made."""

    def __init__(self, counter: CollectiveCounter, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(dist.group.WORLD, range(0), shape, dtype, torch.device("meta"))
        self._counter = counter

    def issue(
        self, peer: int, sends: Sequence[torch.Tensor], receives: int, outputs: Sequence[torch.Tensor] = ()
    ) -> list[Receipt]:
        received = [torch.empty(self.shape, dtype=self.dtype, device=self.device) for _ in range(receives)]
        for kind, tensors in (("send", sends), ("recv", received)):
            for tensor in tensors:
                self._counter.traffic[Route("pp", kind, tensor.itemsize)] += tensor.numel()
        return [Receipt(tensor, peer, 0) for tensor in received]


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that torch is asked for, by the tensors they are asked on."""

    def __init__(self, layout: Layout, rank: int) -> None:
        super().__init__()
        self.layout, self.own = layout, layout.coordinates(rank)
        self.traffic: Traffic = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "_c10d_functional" and name != "wait_tensor":
            self._functional(name.partition(".")[0], args)
        elif namespace == "c10d":
            self._in_place(name.partition(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _functional(self, name: str, args: tuple) -> None:
        group, x = dist.distributed_c10d._resolve_process_group(args[-1]), args[0]
        if name.startswith("all_gather"):
            self._count("all_gather", group, x.numel() * dist.get_world_size(group), x.itemsize)
        else:
            self._count("reduce_scatter" if name.startswith("reduce_scatter") else name, group, x.numel(), x.itemsize)

    def _in_place(self, name: str, args: tuple) -> None:
        tensors = {"_allgather_base_": args[:1], "_reduce_scatter_base_": args[1:2]}.get(name, args[0])
        kind = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce"}
        boxed = next(argument for argument in args if isinstance(argument, torch.ScriptObject))
        for x in tensors:
            self._count(kind.get(name, name), ProcessGroup.unbox(boxed), x.numel(), x.itemsize)

    def _count(self, kind: str, group: ProcessGroup, elements: int, itemsize: int) -> None:
        # The one collective of 8-byte numbers is the sum over the world at the end of a step; a group along an axis may
        # have the same ranks.
        route = Route("world" if itemsize == 8 else self._axis(dist.get_process_group_ranks(group)), kind, itemsize)
        self.traffic[route] += elements

    def _axis(self, ranks: Sequence[int]) -> str:
        coordinates = [self.layout.coordinates(rank) for rank in (ranks[0], ranks[-1])]
        axis = next(axis for axis in coordinates[0] if coordinates[0][axis] != coordinates[1][axis])
        members = [self.layout.coordinates(rank)[axis] for rank in ranks]
        return group_name(axis, members, self.layout.size(axis))
