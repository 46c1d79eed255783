"""ZeRO over the blocks of one model: when gradients are reduced and parameters gathered (Rajbhandari et al. 2020,
arXiv 1910.02054, section 5).

[Note: order of collectives]
Every rank issues the same collectives in the same order: reductions in reverse block order, gathers in the order of
use. A block whose gradient is ready before its turn waits, and what never became ready (a parameter unused on
this rank) is flushed with zeros when backward ends. A gather that no earlier pass foretold is agreed on first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megazero.errors import MegazeroError
from megazero.sharding import Rectangle, ShardSpec
from megazero.zero.block import Block, Reader, Sharding, State
from megazero.zero.blocks import Unit
from megazero.zero.flat import FlatLayout, buckets, optimizer_group
from megazero.zero.gathering import Gathering
from megazero.zero.groups import DataParallel
from megazero.zero.guard import Guard
from megazero.zero.loans import Loans
from megazero.zero.offload.sizes import shares_of
from megazero.zero.offload.tier import Tier, TierMaker, claim_tier
from megazero.zero.order import UseOrder
from megazero.zero.reduction import GradientReduction
from megazero.zero.settings import ZeroSettings


@dataclass
class _Unit:
    """A unit at run time. ``waiting``: its modules that have not run since it was gathered."""

    plan: Unit
    blocks: list[int]
    freed: list[Block]
    waiting: set[nn.Module]

    @property
    def numel(self) -> int:
        return sum(block.layout.numel for block in self.freed)


class ShardedModel(Loans):
    """The blocks of one rank's model and the data-parallel collectives on them.

    It is driven by passes: ``begin_forward``, the hooks of zero.hooks as modules run, ``end_forward``;
    ``begin_backward``, the hooks again, ``finish_backward``. A pass runs one chunk of the model: what it ends, and lets
    go of, are units of that chunk alone. Optimizers go by ``update_buckets``.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        groups: DataParallel,
        settings: ZeroSettings,
        *,
        dtypes: Mapping[str, torch.dtype],
        grad_dtype: torch.dtype,
        device: torch.device,
        group_of: Callable[[str, ShardSpec], str] = optimizer_group,
        source_of: Callable[[str, nn.Parameter], Callable[[], torch.Tensor]] | None = None,
        guard: Guard | None = None,
        make_tier: TierMaker = claim_tier,
    ) -> None:
        """``dtypes``: of each parameter's copy for the model's use. ``group_of``: a parameter's optimizer group.
        ``make_tier``: for what is kept off the device, where anything is.

        ``source_of``: asked block by block before a parameter gets its place, for a function that gives the whole of
        its values, the same on every rank; without it the blocks are left to be loaded.
        """
        self.groups, self.settings, self.device = groups, settings, device
        self.sharding = Sharding.of_stage(settings.stage)
        parameters = dict(model.named_parameters())
        frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
        threshold = settings.persistence_threshold if self.sharding.parameters else None
        plans = [
            [
                (plan, FlatLayout.build(plan.name, plan.specs, groups.shard.size, group_of))
                for plan in unit.split(frozen, dtypes, threshold)
            ]
            for unit in units
        ]
        share = groups.shard.size if self.sharding.state else 1
        shares = shares_of(list(chain(*plans)), share, self.sharding.parameters, grad_dtype, settings.offload)
        self.tier: Tier | None = None
        if settings.offload.active:
            self.tier = make_tier(settings.offload, device, shares)
        self.hooks: list[RemovableHandle] = []  # of hooks.py, on modules and parameters
        self.blocks: list[Block] = []
        self.units: list[_Unit] = []
        for unit, own in zip(units, plans, strict=True):
            indices = []
            for plan, layout in own:
                sources = {n: source_of(n, parameters[n]) for n in plan.specs} if source_of is not None else {}
                sharding = replace(self.sharding, parameters=self.sharding.parameters and not plan.persistent)
                rank, grads = groups.shard.rank, grad_dtype
                block = Block(
                    layout,
                    parameters,
                    rank,
                    sharding,
                    plan.dtype,
                    grads,
                    device,
                    plan.trainable,
                    guard,
                    self.tier,
                    shares[len(self.blocks)].state_leaves,
                )
                indices.append(len(self.blocks))
                self.blocks.append(block)
                for name in list(sources):
                    # One by one, and each let go: the model is never there twice.
                    block.load("weight", _boxes_of(name, sources.pop(name)()), only=name)
            freed = [self.blocks[i] for i in indices if self.blocks[i].sharding.parameters]
            self.units.append(_Unit(unit, indices, freed, set(unit.modules)))
        self._plan_buckets()
        self._places = {p: (i, at) for i, block in enumerate(self.blocks) for at, p in enumerate(block.parameters)}
        self._unit_of = {block: i for i, unit in enumerate(self.units) for block in unit.blocks}
        self._running: Counter[int] = Counter()  # modules of a unit in the midst of their forward
        self._kept: set[int] = set()  # units whose parameters stay whole to the end of the next backward
        self._lent: dict[int, None] = {}  # units that graphs of this step use where no module of theirs runs
        self._orders: defaultdict[tuple[str, int], UseOrder] = defaultdict(UseOrder)  # by kind of pass and chunk
        self._chunk, self._evaluating = 0, False
        self._order = self._orders["forward", 0]
        self.in_backward = self._in_pass = self._in_forward = False
        self._completes = True
        self.uses: Counter[int] = Counter()  # forwards of a unit whose backward is to come
        self._entered = 0  # units in the running forward
        self._live = 0  # gathered elements of blocks that come and go
        self.backwards = 0
        self._passed: set[int] = set()  # units that the running backward has done with
        self._at = -1  # the unit that it entered last
        self._local_copies: dict[int, torch.Tensor] = {}
        self._gathering = Gathering(groups, self.sharding, self.tier, self._local_copies)

    def close(self) -> None:
        """The end: what the host is doing is done."""
        if self.tier is not None:
            self.tier.close()

    def _plan_buckets(self) -> None:
        def bucketed(items: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
            sizes = [sum(self.blocks[i].layout.numel for i in item) for item in items]
            return [[i for item in bucket for i in items[item]] for bucket in buckets(sizes, limit)]

        indices = range(len(self.blocks))
        trained = [[i] for i in indices if self.blocks[i].trainable]
        resident = [[i] for i in indices if not self.blocks[i].sharding.parameters]
        self.update_buckets = bucketed(trained, self.settings.allgather_bucket_size)
        self._gather_buckets = bucketed(resident, self.settings.allgather_bucket_size)
        # A unit's blocks are ready together.
        backward: list[list[list[int]]] = [
            [] for _ in range(1 + max((unit.plan.chunk for unit in self.units), default=0))
        ]
        for unit in reversed(self.units):
            if item := [i for i in reversed(unit.blocks) if self.blocks[i].trainable]:
                backward[unit.plan.chunk].append(item)
        reduce_buckets = [bucketed(items, self.settings.reduce_bucket_size) for items in backward]
        self.reduction = GradientReduction(
            self.blocks, reduce_buckets, self.groups.shard, self.sharding, self.settings.overlap
        )

    # Gathering

    def gather(self) -> None:
        """Issue the all-gather of every stale block that stays whole between uses, bucket by bucket."""
        for bucket in self._gather_buckets:
            self.gather_bucket(bucket)

    def gather_bucket(self, bucket: Sequence[int]) -> None:
        """Issue the all-gather of the stale blocks among ``bucket`` that stay whole between uses."""
        blocks = [self.blocks[i] for i in bucket]
        self._gathering.issue_when_ready([b for b in blocks if not b.sharding.parameters and b.state is State.SHARDED])

    def enter(self, index: int) -> None:
        """A unit is about to be used, in forward or backward: make its parameters whole, and fetch ahead."""
        unit = self.units[index]
        if not self._in_pass:
            self._start_pass()
        self._entered += 1
        if unit.freed and not self.in_backward:
            self._running[index] += 1
        if self._entered > 2 and not self.in_backward:
            # The last buckets of the backward before had the time of the first layers' forward to be reduced.
            self.reduction.finish_cut(self.reduction.in_flight)
        if unit.freed:
            foretold = self._order.use(index)
            self._fetch(index, foretold)
            self._prefetch()
        for i in unit.blocks:
            self.blocks[i].use()

    def reach(self, index: int) -> None:
        """A gradient has come to what a unit returned."""
        if not self.in_backward and self.units[index].freed:
            raise MegazeroError(
                f"backward came to {self.units[index].plan.name}, whose parameters are cut over the ranks (stage 3), "
                "but not from its engine's backward: call engine.backward(loss) instead of loss.backward() or "
                "autograd.grad. Where a loss leads through the models of two engines, make one model of both, or use "
                "stage 2"
            )
        if self.in_backward and index != self._at and index not in self._passed:
            self._at = index
            self.enter(index)

    def _fetch(self, index: int, foretold: bool) -> None:
        unit = self.units[index]
        stale = [block for block in unit.freed if block.state is State.SHARDED]
        if not stale:
            return
        if not foretold and self.groups.agreement is not None:
            self.groups.agreement.on(unit.plan.name)
        self._gathering.issue(stale, self.in_backward)
        self._live += sum(block.layout.numel for block in stale)
        unit.waiting = set(unit.plan.modules)

    def _prefetch(self) -> None:
        ahead = 0
        for index in self._order.ahead():
            unit = self.units[index]
            # A unit is never cut: the next one is fetched whatever its size, unless nothing is to be.
            size, ahead = ahead, ahead + unit.numel
            if (size and ahead > self.settings.prefetch_bucket_size) or not self.settings.prefetch_bucket_size:
                return
            if any(block.state is State.SHARDED for block in unit.freed):
                # The unit that is used now would wait for the host as well. Where ranks gather together, none of them
                # fetches ahead what is being updated, as they may not all see when that is done.
                alone = self.groups.shard.size == 1
                if any(block.waits_for_host if alone else block.is_updating for block in unit.freed):
                    return
                if self._live + unit.numel > self.settings.max_live_parameters:
                    return
                self._fetch(index, foretold=True)

    def leave(self, index: int, module: nn.Module) -> None:
        """A module of a unit has run forward."""
        unit = self.units[index]
        if not unit.freed or self.in_backward:
            return
        self._running[index] -= 1
        unit.waiting.discard(module)
        if not unit.waiting and self._reshards_after_forward:
            self.release(index)

    @property
    def in_forward(self) -> bool:
        """Whether the model's own forward is running, between ``begin_forward`` (or ``begin_pass``) and its end."""
        return self._in_forward

    @property
    def in_training_forward(self) -> bool:
        return not self.in_backward and not self._evaluating

    @property
    def _reshards_after_forward(self) -> bool:
        return self._evaluating or (self.settings.reshard_after_forward and not self.settings.keep_gathered)

    def release(self, index: int) -> None:
        """Let go of a unit's parameters."""
        for block in self.units[index].freed:
            if block.state is State.SHARDED or block.holders or index in self._kept:
                continue
            if (name := block.changed()) is not None:
                raise MegazeroError(
                    f"{name} was changed in place while a module ran (by max_norm of an embedding, say), which stage "
                    "3 would lose: change it between steps, `with GatheredParameters(parameter, modifier_rank=0):`, or "
                    "use stage 2"
                )
            self._keep_local_copy(block)
            self._live -= block.layout.numel
            block.release()

    def _keep_local_copy(self, block: Block) -> None:
        local = self.groups.local
        if local is None or self.in_backward or self._evaluating:
            return
        block.use()
        copy = self._local_copies.get(id(block))
        if copy is None:
            copy = self._local_copies[id(block)] = torch.empty_like(local.slice_of(block.flat))
        copy.copy_(local.slice_of(block.flat))

    def release_all(self) -> None:
        """Let go of every unit's parameters."""
        for index in range(len(self.units)):
            self.release(index)

    def _release_chunk(self) -> None:
        """Let go of all parameters that the running pass may use."""
        for index, unit in enumerate(self.units):
            if unit.plan.chunk == self._chunk:
                self.release(index)

    def unit_of(self, block: int) -> int:
        """The unit that a block belongs to."""
        return self._unit_of[block]

    # Passes

    def begin_forward(self, chunk: int = 0) -> None:
        """A forward of its own is about to run: its backward is one forward's."""
        self.uses = Counter()
        self._chunk = chunk
        self.begin_pass()

    def begin_pass(self) -> None:
        """The model's own forward is about to run. Modules that are called without it begin a pass by themselves."""
        self._start_pass()
        self._in_forward = True

    def abandon_forward(self) -> None:
        """It ended in an error of the user's."""
        self._in_pass = self._in_forward = False
        self._running.clear()

    def _start_pass(self) -> None:
        self._evaluating = not torch.is_grad_enabled()
        self._order = self._orders["evaluation" if self._evaluating else "forward", self._chunk]
        self._order.begin()
        self._in_pass = True
        self._entered = 0
        self._running.clear()

    def end_forward(self) -> None:
        """What was gathered and whose turn to be let go did not come is let go."""
        self._order.end()
        self._in_pass = self._in_forward = False
        if self._reshards_after_forward:
            self._release_chunk()

    def begin_backward(self, chunk: int = 0, completes: bool = True) -> None:
        """``completes``: it makes all gradients; else some are left to another one, which autograd may have no part in:
        it says of each unit, the last first, when it is complete."""
        self.reduction.begin_backward(chunk)
        self._completes = completes
        self._chunk, self._evaluating = chunk, False
        self.in_backward = True
        self.backwards += 1
        self._passed.clear()
        self._at = -1
        self._order = self._orders["backward", chunk]
        self._order.begin()
        self._in_pass, self._in_forward = True, False
        for index in self._lent:
            if self.units[index].plan.chunk == chunk:
                self._kept.add(index)
                self.enter(index)

    def abandon_backward(self) -> None:
        """It ended in an error, where other ranks need not be: nothing is waited for here. The step's gradients are to
        be forgotten before the next backward."""
        self.reduction.abandon()
        self.in_backward = self._in_pass = False
        self._kept.clear()

    def end_step(self) -> None:
        """What the step's forwards have left for backwards is used up."""
        self.uses.clear()
        self._lent.clear()

    def reduce_in_next_backward(self) -> None:
        """The backward that follows is its chunk's last in the step: it completes the accumulated gradients."""
        self.reduction.last_of_step = True

    def unit_complete(self, index: int) -> None:
        """A unit's parameters have all their gradients of the running backward."""
        self._passed.add(index)
        if not self._completes:
            for i in self.units[index].blocks:
                self.reduction.move(i)
            return
        earlier = self.reduction.in_flight
        for i in reversed(self.units[index].blocks):
            self.reduction.accumulate(i)
        if self._lets_go_in_backward:
            self.release(index)
        self.reduction.issue_ready()
        # What was issued before this unit's backward had all its time.
        self.reduction.finish_cut(earlier)

    @property
    def _lets_go_in_backward(self) -> bool:
        return self.reduction.last_of_step or not self.settings.keep_gathered

    def gradient_ready(self, index: int, position: int) -> None:
        """Autograd has made the gradient of one parameter of a block."""
        if self.in_backward:
            self.reduction.gradient_ready(index, position)

    def add_product(self, parameter: nn.Parameter, left: torch.Tensor, right: torch.Tensor) -> None:
        """The gradient of a matrix, by the running backward, is left (rows, n) · right (n, columns); autograd has made
        none. Its unit is not yet complete."""
        self.reduction.add_product(*self._places[parameter], left, right)

    def finish_backward(self) -> None:
        """Call after every backward: flush blocks that autograd did not report, in order."""
        if self._completes:
            self.reduction.flush()
        else:
            self.reduction.move_all()
        late = [name for name, parameter in self.named_parameters() if parameter.grad is not None]
        if late:
            raise MegazeroError(
                f"a gradient of {late[0]} came after those of its module were taken for complete: the module was used "
                "by a graph of an earlier step (run its forward and its backward in the same step), or another module "
                "uses its parameter (call megazero.zero.register_external_parameter(module, parameter))"
            )
        self._order.end()
        self.in_backward = self._in_pass = False
        self._kept.clear()
        if self._lets_go_in_backward:
            self._release_chunk()
        if self._completes:
            self.reduction.end_backward()

    @property
    def reduced(self) -> bool:
        """Whether whole gradient buffers hold, in this rank's slices, the sums over ranks."""
        return self.reduction.reduced

    def take_gradients(self, whole: Sequence[torch.Tensor]) -> None:
        """The gradients of a step whose backwards nothing here has seen, of every trained block, in order."""
        self.reduction.take_gradients(whole)

    def wait_for_gradients(self) -> None:
        """Order what follows after every reduction."""
        self.reduction.wait()

    def forget_gradients(self) -> None:
        """Gradients that no step has used are as if they had not been."""
        self.reduction.forget()

    def rest(self) -> None:
        """Before parameters are loaded into a running model: no gradient is left, and nothing is under way."""
        self.forget_gradients()
        for block in self.blocks:
            if block.state is State.GATHERING:  # into the memory that is to be written
                block.use()
        self.release_all()

    def finish_gradients(self) -> None:
        """The step's gradients are whole from here on: all reductions done, over copies of the state too."""
        self.reduction.finish()
        if self.tier is not None:
            self.tier.link.drain()
        replicate = self.groups.replicate
        if replicate.size == 1:
            return
        grads = [block.gradient.owned() for block in self.trained if block.host_grad is None]
        if grads:
            replicate.all_reduce(grads).wait()
        for host_grad in (block.host_grad for block in self.trained):
            if host_grad is not None:
                part = host_grad.send_back()
                replicate.all_reduce([part]).wait()
                host_grad.replace(part)

    @property
    def trained(self) -> list[Block]:
        """Blocks with gradients and optimizer state."""
        return self.reduction.trained

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Local parameters by name, in block order."""
        return chain.from_iterable(
            zip((e.name for e in block.layout.entries), block.parameters, strict=True) for block in self.blocks
        )


def _boxes_of(name: str, value: torch.Tensor) -> Reader:
    def read(wanted: str, shape: tuple[int, ...], box: Rectangle) -> torch.Tensor:
        assert wanted == name, (wanted, name)
        return value[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape, strict=True))]

    return read
