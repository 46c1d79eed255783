"""ZeRO over the blocks of one model: when gradients are reduced and parameters gathered (Rajbhandari et al. 2020,
arXiv 1910.02054, section 5).

[Note: order of collectives]
Every rank issues the same collectives in the same order: reductions in reverse block order, gathers in block
order. A block whose gradient is ready before its turn waits, and what never became ready (a parameter unused on
this rank) is flushed with zeros when backward ends.

[Note: when a block's gradient is complete]
An identity on the block's input has the lowest sequence number of everything the block computes, and autograd
runs gradient accumulation before anything else that is ready; so when the identity's backward runs, the
parameters' gradients are all there. A block whose input needs no gradient is complete when backward ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import nn

from megazero.comm import Communicator, Work
from megazero.zero.block import Block, State
from megazero.zero.blocks import BlockPlan
from megazero.zero.flat import FlatLayout, buckets


class _BackwardReached(torch.autograd.Function):
    """Identity; its backward calls ``callback``."""

    @staticmethod
    def forward(ctx, x, callback):
        ctx.callback = callback
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.callback()
        return grad, None


def _leave_meta(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Put parameters without elements in place of those on the meta device, one for one, so that ties stay ties."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in replaced:
                replaced[parameter] = nn.Parameter(torch.empty(0, dtype=dtype, device=device))
            setattr(module, name, replaced[parameter])


class ShardedModel:
    """The blocks of one rank's model and the data-parallel collectives on them.

    ``stage`` 0 keeps everything whole on every rank, 1 cuts the optimizer state.
    """

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[BlockPlan],
        stage: int,
        dp: Communicator,
        *,
        dtype: torch.dtype,
        grad_dtype: torch.dtype,
        device: torch.device,
        reduce_bucket_size: int,
        allgather_bucket_size: int,
    ) -> None:
        self.dp, self.stage = dp, stage
        _leave_meta(model, dtype, device)
        parameters = dict(model.named_parameters())
        self.blocks: list[Block] = []
        for plan in plans:
            layout = FlatLayout.build(plan.name, plan.specs, dp.size)
            self.blocks.append(Block(layout, parameters, dp.rank, stage >= 1, dtype, grad_dtype, device))
        layouts = [block.layout for block in self.blocks]
        backward_order = range(len(self.blocks))[::-1]
        reduce = buckets([layouts[i] for i in backward_order], reduce_bucket_size)
        self._reduce_buckets = [[backward_order[i] for i in bucket] for bucket in reduce]
        self.gather_buckets = buckets(layouts, allgather_bucket_size)
        self._complete: set[int] = set()  # blocks whose gradient of the running backward is accumulated
        self._reducing = False
        self._next_reduction = 0
        self._works: list[Work] = []
        for index, plan in enumerate(plans):
            plan.entry.register_forward_pre_hook(self._pre_forward(index))

    def _pre_forward(self, index: int):
        def hook(module: nn.Module, args: tuple) -> tuple | None:
            self.blocks[index].use()
            x = args[0]
            if torch.is_grad_enabled() and x.requires_grad:
                return (_BackwardReached.apply(x, lambda: self._block_complete(index)), *args[1:])
            return None

        return hook

    def gather(self) -> None:
        """Issue the all-gather of every stale block, bucket by bucket in the order of use."""
        for bucket in self.gather_buckets:
            self.gather_bucket(bucket)

    def gather_bucket(self, bucket: Sequence[int]) -> None:
        """Issue the all-gather of the stale blocks among ``bucket``."""
        stale = [self.blocks[i] for i in bucket if self.blocks[i].state is State.SHARDED]
        if not stale:
            return
        cut = self.stage >= 1 and self.dp.size > 1
        work = self.dp.all_gather([block.flat for block in stale]) if cut else None
        for block in stale:
            block.gathering(work)

    def use_all(self) -> None:
        """Order what follows after every all-gather."""
        self.gather()
        for block in self.blocks:
            block.use()

    def reduce_in_next_backward(self) -> None:
        """The backward that follows completes the accumulated gradients: reduce each bucket as it is done."""
        self._reducing = True
        self._next_reduction = 0

    def _block_complete(self, index: int) -> None:
        self.blocks[index].accumulate()
        self._complete.add(index)
        if self._reducing:
            self._reduce_ready()

    def _reduce_ready(self) -> None:
        while self._next_reduction < len(self._reduce_buckets):
            bucket = self._reduce_buckets[self._next_reduction]
            if not self._complete.issuperset(bucket):
                return
            self._next_reduction += 1
            if self.dp.size > 1:
                grads = [self.blocks[i].grad for i in bucket]
                collective = self.dp.reduce_scatter if self.stage >= 1 else self.dp.all_reduce
                self._works.append(collective(grads))

    def finish_backward(self) -> None:
        """Call after every backward: flush blocks that autograd did not report, in order."""
        for index in reversed(range(len(self.blocks))):
            if index not in self._complete:
                self._block_complete(index)
        self._complete.clear()
        if self._reducing:
            assert self._next_reduction == len(self._reduce_buckets)
            self._reducing = False

    def wait_for_gradients(self) -> None:
        """Order what follows after every reduction."""
        for work in self._works:
            work.wait()
        self._works.clear()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Local parameters by name, in block order."""
        return chain.from_iterable(
            zip((e.name for e in block.layout.entries), block.parameters, strict=True) for block in self.blocks
        )
