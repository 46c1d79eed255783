"""Parameters that are whole outside the modules that they belong to: for the user, or where a forward uses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megazero.zero.block import State

if TYPE_CHECKING:
    from megazero.zero.sharded import ShardedModel


class Loans:
    """Methods of a ShardedModel.

    [Note: parameters used elsewhere] Nothing says when a use outside of a unit's own modules ends, in forward or
    backward. So the unit stays whole to the end of the forward and of the backward that follows, is gathered again
    before every further backward of the step, and its gradients are complete when a backward ends, not before.
    """

    def hold(self: ShardedModel, indices: Sequence[int], what: str) -> None:
        """Make blocks whole, and keep them so whatever passes do, until ``let_go``. ``what``: a name for the user."""
        blocks = [self.blocks[i] for i in indices]
        stale = [block for block in blocks if block.state is State.SHARDED]
        if stale:
            if self.groups.agreement is not None:
                self.groups.agreement.on(what)
            self._gathering.issue(stale, self.in_backward)
        for block in stale:
            block.lent = block.sharding.parameters
            self._live += block.layout.numel if block.lent else 0
        for block in blocks:
            block.use()
            block.holders += 1

    def let_go(self: ShardedModel, indices: Sequence[int]) -> None:
        """The end of a ``hold``. What a running forward has used stays whole for its backward."""
        for i in indices:
            block, unit = self.blocks[i], self._unit_of[i]
            block.holders -= 1
            in_graph = self._in_pass and torch.is_grad_enabled() and not self._running[unit]
            if in_graph and not self.in_backward:
                self.uses[unit] += 1
            if in_graph and block.sharding.parameters:
                self._keep(unit)
            elif block.lent and not block.holders and unit not in self._kept:
                self._live -= block.layout.numel
                block.move_out()
            block.lent &= block.holders > 0

    def lend(self: ShardedModel, index: int) -> bool:
        """A unit's parameters are used where no module of it runs: by another module, or by a method or function that
        calls none. They are whole from here on. False outside of every pass, where that is a mistake.
        """
        if not (self.in_backward or self._in_forward or +self._running):
            return False
        if self.in_training_forward:
            self.uses[index] += 1
            self._keep(index)
        running = self._running[index]
        self.enter(index)
        self._running[index] = running
        return True

    def _keep(self: ShardedModel, index: int) -> None:
        self._kept.add(index)
        if not self.in_backward:
            self._lent[index] = None
