"""AdamW for blocks whose float32 state is in host memory: torch's fused CPU kernel, piece by piece, in a thread.

[Note: pieces] A piece (`buffer_size` elements) is small enough that what one operation leaves of it in the cores'
caches is there for the next: the gradient's conversion, the kernel, and the copy into the parameters' dtype pass over
memory once. Pieces are multiples of the alignment, so that the kernel's vectors cut no piece otherwise than the whole:
the results are the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch

from megazero.zero.block import Block
from megazero.zero.offload.link import ARRIVED, Arrival
from megazero.zero.offload.tier import Piece, Tier, pieces


class Scalars(NamedTuple):
    """A step's numbers, on the device. ``divisor``: of the gradients. ``skip``: 1 where nothing may change. ``count``:
    Adam's own, this step's included."""

    divisor: torch.Tensor
    skip: torch.Tensor
    count: torch.Tensor


class Options(NamedTuple):
    """Of one optimizer group."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


class Sent(NamedTuple):
    """Scalars on their way to the host: (3,) float32."""

    values: torch.Tensor
    arrival: Arrival


class HostAdamW:
    """Updates blocks in ``tier``'s thread, in the order of the calls."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def send(self, scalars: Scalars) -> Sent:
        """The step's numbers to the host, once they are known."""
        values = torch.stack([value.float() for value in scalars])
        host = torch.empty(3, dtype=torch.float32, pin_memory=values.is_cuda)
        return Sent(host, self._tier.link.out(host, values))

    def update(self, block: Block, options: Mapping[str, Options], scalars: Sent) -> None:
        """After ``block.before_update``: update it when its gradient and the scalars are there; by group name."""
        block.updating(self._tier.submit(partial(self._update, block, options, scalars)))

    def _update(self, block: Block, options: Mapping[str, Options], scalars: Sent) -> Arrival:
        scalars.arrival.wait_on_host()
        divisor, skip, _ = scalars.values.tolist()
        arrival = ARRIVED
        if skip:
            return arrival
        assert block.host_grad is not None
        grad = block.host_grad.there()
        for piece in pieces(block.layout, block.owned, self._tier.settings.buffer_size):
            master = block.master[piece.start : piece.end]
            moments = [block.optimizer_state[name][piece.start : piece.end] for name in ("exp_avg", "exp_avg_sq")]
            part = self._gradient(grad[piece.start : piece.end], divisor)
            _adamw(master, part, moments, options[piece.group], scalars.values[2])
            arrival = self._send_back(block, piece, master, arrival)
        return arrival

    def _gradient(self, grad: torch.Tensor, divisor: float) -> torch.Tensor:
        """In float32, divided; the kernel would write it back to memory."""
        if grad.dtype == torch.float32 and divisor == 1:
            return grad
        scratch = self._tier.scratch("gradient", grad.numel())
        scratch.copy_(grad)
        return scratch if divisor == 1 else scratch.div_(divisor)

    def _send_back(self, block: Block, piece: Piece, master: torch.Tensor, arrival: Arrival) -> Arrival:
        if block.values is block.master:
            return arrival
        values = block.values[piece.start : piece.end]
        if block.values_leave:
            values.copy_(master)
            return arrival
        return self._tier.link.bring(values, master)


def _adamw(
    master: torch.Tensor, grad: torch.Tensor, moments: list[torch.Tensor], options: Options, count: torch.Tensor
) -> None:
    torch._fused_adamw_(
        [master],
        [grad],
        [moments[0]],
        [moments[1]],
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
