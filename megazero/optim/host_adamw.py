"""Adam and AdamW for state in host memory: torch's fused CPU kernels, piece by piece, in a thread; in another one, new
values on their way to the device.

[Note: pieces and strips] Pieces (`buffer_size` elements) are what is read, written and sent as one. Where state is kept
in fewer bits, a piece is worked on in strips, so small that what one operation leaves of them in the cores' caches is
there for the next: conversions and the kernel between them pass over memory once. Float32 state has one operation or
two, and fewer of them hold the main thread up less. Both are multiples of the alignment, so that the kernel's vectors
cut nothing otherwise than the whole: the results are the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import torch

from megazero.zero.block import Block
from megazero.zero.offload.link import ARRIVED, Arrival
from megazero.zero.offload.store import Working
from megazero.zero.offload.tier import Tier

STRIP = 2**17
"""Elements of a strip for each thread: five float32 tensors of so many are a little more than a core's second cache."""


class Options(NamedTuple):
    """Of one optimizer group. ``decoupled``: weight decay is AdamW's, else an L2 term of the gradient."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool = True


class Target(NamedTuple):
    """What of one group a block owns: elements [start, end) of its owned range.

    ``count``: the group's own step counter, which an update that is not skipped advances; None: the step's."""

    start: int
    end: int
    options: Options
    count: torch.Tensor | None = None


class Sent(NamedTuple):
    """A step's numbers on their way to the host, (3,) float32: what gradients are divided by (or multiplied with), 1
    where nothing may change, Adam's counter with this step."""

    values: torch.Tensor
    arrival: Arrival
    divides: bool


class HostAdam:
    """Updates blocks in ``tier``'s thread, in the order of the calls."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def send(self, scale: torch.Tensor, skip: torch.Tensor, count: torch.Tensor, *, divides: bool) -> Sent:
        """The step's scalars, on the device, to the host: as soon as they are known there."""
        values = torch.stack([value.float() for value in (scale, skip, count)])
        host = torch.empty(3, dtype=torch.float32, pin_memory=values.is_cuda)
        return Sent(host, self._tier.link.out(host, values), divides)

    def update(self, block: Block, targets: Sequence[Target], scalars: Sent) -> None:
        """After ``block.before_update``: update it when its gradient and the scalars are there."""
        if block.store is not None:
            block.store.ahead()
        done: Future[Arrival] = Future()
        self._tier.submit(partial(self._run, block, targets, scalars, done))
        block.updating(done)

    def _run(self, block: Block, targets: Sequence[Target], scalars: Sent, done: Future[Arrival]) -> None:
        """``done``: settled by the thread that hands values on, after the last of the block's."""
        try:
            if self._tier.error is not None:
                raise self._tier.error
            handed = self._update(block, targets, scalars)
            self._tier.hand_on(partial(self._settle, done, handed))
        except BaseException as error:
            self._tier.fail(error)
            done.set_exception(error)

    def _update(self, block: Block, targets: Sequence[Target], scalars: Sent) -> list[Future[Arrival]]:
        scalars.arrival.wait_on_host()
        skip = bool(scalars.values[1])
        handed: list[Future[Arrival]] = []
        if skip or not targets:  # of a block whose last slice is padding, a rank may own no more than that
            if block.store is not None:
                block.store.skip()
            return handed
        assert block.host_grad is not None
        meter = self._tier.meter
        with meter.timed("gradients"):
            grad = block.host_grad.there()
        numel, size = block.owned[1] - block.owned[0], self._tier.settings.buffer_size
        counts = [scalars.values[2] if target.count is None else target.count.add_(1) for target in targets]
        strip, step = size if block.store is None else STRIP * self._tier.threads, float(counts[0])
        for start in range(0, numel, size):
            end = min(start + size, numel)
            if block.store is not None:
                with meter.timed("files"):
                    block.store.open(start, end)
            with meter.timed("update"):
                for low in range(start, end, strip):
                    working = _working(block, low, min(low + strip, end))
                    self._change(working, low, grad, zip(targets, counts, strict=True), scalars)
                    if block.store is not None:
                        block.store.keep(working, low, low + working.master.numel(), step)
                values = block.master[start:end] if block.store is None else block.store.new_values()
                stored = 12 if block.store is None else block.store.itemsize
                meter.touched += (end - start) * (2 * stored + grad.itemsize + 2 * block.values.itemsize)
            if values is not None and block.values is not block.master:
                handed.append(self._tier.hand_on(partial(self._pass_on, block, start, values)))
                if block.store is not None and block.store.is_in_file:
                    handed[-1].result()  # they are in a buffer that the next piece takes
            if block.store is not None:
                with meter.timed("files"):
                    block.store.done(start, changed=True)
        return handed

    def _change(
        self,
        state: Working,
        start: int,
        grad: torch.Tensor,
        targets: Iterable[tuple[Target, torch.Tensor]],
        scalars: Sent,
    ) -> None:
        """What each group has of a strip that begins at ``start`` of the block's owned range. ``targets``: with their
        counters."""
        end = start + state.master.numel()
        for target, count in targets:
            first, last = max(start, target.start), min(end, target.end)
            if first < last:
                part = self._gradient(grad[first:last], float(scalars.values[0]), scalars.divides)
                _kernel([values[first - start : last - start] for values in state], part, target.options, count)

    def _gradient(self, grad: torch.Tensor, scale: float, divides: bool) -> torch.Tensor:
        """In float32, scaled."""
        wide = grad.dtype == torch.float32
        if wide and scale == 1:
            return grad
        scratch = self._tier.scratch("gradient", grad.numel())
        if not wide:  # scaled before it is in float32, it would be rounded
            grad = scratch.copy_(grad)
        if scale == 1:
            return grad
        return torch.div(grad, scale, out=scratch) if divides else torch.mul(grad, scale, out=scratch)

    def _pass_on(self, block: Block, start: int, source: torch.Tensor) -> Arrival:
        """New values to where the block keeps them."""
        with self._tier.meter.timed("values"):
            if block.values_leave:
                block.set_values(start, source)
                return ARRIVED
            values, link = block.values[start : start + source.numel()], self._tier.link
            return link.bring_masters(values, source) if block.sends_masters else link.bring(values, source)

    def _settle(self, done: Future[Arrival], handed: Sequence[Future[Arrival]]) -> None:
        """All of ``handed`` have run: the last copy ends after the others, which are on its stream."""
        try:
            arrivals = [future.result() for future in handed]
        except BaseException as error:
            self._tier.fail(error)
            done.set_exception(error)
        else:
            done.set_result(arrivals[-1] if arrivals else ARRIVED)


def _working(block: Block, start: int, end: int) -> Working:
    if block.store is not None:
        return block.store.working(start, end)
    kept = block.optimizer_state
    return Working(block.master[start:end], kept["exp_avg"][start:end], kept["exp_avg_sq"][start:end])


def _kernel(state: Sequence[torch.Tensor], grad: torch.Tensor, options: Options, count: torch.Tensor) -> None:
    master, exp_avg, exp_avg_sq = state
    (torch._fused_adamw_ if options.decoupled else torch._fused_adam_)(
        [master],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [count],
        amsgrad=False,
        lr=options.lr,
        beta1=options.betas[0],
        beta2=options.betas[1],
        weight_decay=options.weight_decay,
        eps=options.eps,
        maximize=False,
    )
