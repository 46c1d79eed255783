"""AdamW on the owned ranges of the blocks (Loshchilov & Hutter 2019, arXiv 1711.05101): on a GPU by a kernel that
passes over memory once, else by torch's fused one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megazero.optim.host_adamw import HostAdam, Options, Target
from megazero.zero.block import Block
from megazero.zero.sharded import ShardedModel


class AdamW:
    """``count`` is Adam's own step counter, a float32 scalar on the device: skipped updates do not advance it."""

    def __init__(
        self, sharded: ShardedModel, betas: tuple[float, float], eps: float, weight_decay: float, device: torch.device
    ) -> None:
        self.sharded = sharded
        self.betas, self.eps = betas, eps
        self.decay = {"decay": weight_decay, "no_decay": 0.0}
        self.count = torch.zeros((), dtype=torch.float32, device=device)
        for block in sharded.trained:
            for moment in ("exp_avg", "exp_avg_sq") if block.store is None else ():
                block.optimizer_state[moment] = block.new_state()
        self._host = HostAdam(sharded.tier) if sharded.tier is not None else None

    @torch.no_grad()
    def step(self, lr: float, factor: torch.Tensor, skip: torch.Tensor) -> None:
        """Update every block bucket by bucket, and send each bucket's new parameters on their way.

        Args:
            factor: what gradients are multiplied by first (clipping, loss scale, token count): a scalar tensor.
            skip: float32 scalar, 1 where nothing may change; read on the device only.
        """
        self.count += 1 - skip
        in_one_pass = self.count.is_cuda
        update = self._one_pass(lr, factor, skip) if in_one_pass else self._by_groups(lr, factor, skip)
        on_host = self._on_host(lr, factor, skip)
        for bucket in self.sharded.update_buckets:
            blocks = [self.sharded.blocks[i] for i in bucket]
            here = [block for block in blocks if block.host_grad is None]
            for block in here:
                block.changing()
            update(here)
            for block in here:
                block.updated(copied=in_one_pass and not block.values_leave)
            for block in blocks:
                if block.host_grad is not None:
                    on_host(block)
            self.sharded.gather_bucket(bucket)

    def _on_host(self, lr: float, factor: torch.Tensor, skip: torch.Tensor) -> Callable[[Block], None]:
        """Lets the host update a block whose state is there."""
        leaving = [block for block in self.sharded.trained if block.host_grad is not None]
        for block in leaving:
            block.before_update()
        host = self._host
        if host is None or not leaving:
            return lambda block: None
        scalars = host.send(factor.reciprocal(), skip, self.count, divides=True)
        return lambda block: host.update(block, self._targets(block, lr), scalars)

    def _targets(self, block: Block, lr: float) -> list[Target]:
        base = block.owned[0]
        return [
            Target(start - base, end - base, Options(lr, self.betas, self.eps, self.decay[group]))
            for group, (start, end) in block.layout.group_ranges(*block.owned).items()
        ]

    def _one_pass(self, lr: float, factor: torch.Tensor, skip: torch.Tensor) -> Callable[[Sequence[Block]], None]:
        from megazero.optim.single_pass import adamw  # triton comes with torch's CUDA builds only

        count = self.count.double()
        bias = torch.stack((1 - self.betas[0] ** count, (1 - self.betas[1] ** count).sqrt())).float()
        factor = factor.float()

        def update(blocks: Sequence[Block]) -> None:
            for block in blocks:
                update_block(block)

        def update_block(block: Block) -> None:
            _, end = block.layout.group_ranges(*block.owned).get("decay", (0, block.owned[0]))
            adamw(
                block.master,
                None if block.master is block.values or block.values_leave else block.values,
                block.gradient.owned(),
                block.optimizer_state["exp_avg"],
                block.optimizer_state["exp_avg_sq"],
                decayed=end - block.owned[0],
                lr=lr,
                betas=self.betas,
                eps=self.eps,
                weight_decay=self.decay["decay"],
                factor=factor,
                skip=skip,
                bias=bias,
            )

        return update

    def _by_groups(self, lr: float, factor: torch.Tensor, skip: torch.Tensor) -> Callable[[Sequence[Block]], None]:
        divisor = factor.reciprocal().float()  # the kernel divides

        def update(blocks: Sequence[Block]) -> None:
            for group, decay in self.decay.items():
                self._update(blocks, group, lr, decay, divisor, skip)

        return update

    def _update(
        self, blocks: Sequence[Block], group: str, lr: float, decay: float, divisor: torch.Tensor, skip: torch.Tensor
    ) -> None:
        masters, grads, exp_avgs, exp_avg_sqs = [], [], [], []
        for block in blocks:
            found = block.layout.group_ranges(*block.owned).get(group)
            if found is None:
                continue
            part = slice(found[0] - block.owned[0], found[1] - block.owned[0])
            masters.append(block.master[part])
            grads.append(block.gradient.owned()[part].float())
            exp_avgs.append(block.optimizer_state["exp_avg"][part])
            exp_avg_sqs.append(block.optimizer_state["exp_avg_sq"][part])
        if not masters:
            return
        torch._fused_adamw_(
            masters,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [self.count] * len(masters),
            amsgrad=False,
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=decay,
            eps=self.eps,
            maximize=False,
            grad_scale=divisor,
            found_inf=skip,
        )
