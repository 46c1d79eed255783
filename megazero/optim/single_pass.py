"""AdamW over a flat shard in one pass on the GPU: masters, moments and 16-bit values each cross memory once.

Torch's fused kernel leaves the copy into the parameters' dtype to a pass of its own, and takes lists of tensors, where
a shard is one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _adamw(
    master_ptr,
    value_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    factor_ptr,
    skip_ptr,
    bias_ptr,
    numel,
    decayed,
    lr,
    share,
    share_sq,
    eps,
    weight_decay,
    has_value: tl.constexpr,
    block: tl.constexpr,
):
    if tl.load(skip_ptr) == 0.0:
        factor, step_size = tl.load(factor_ptr), lr / tl.load(bias_ptr)
        root_bias2 = tl.load(bias_ptr + 1)
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = at < numel
        grad = tl.load(grad_ptr + at, inside).to(tl.float32) * factor
        exp_avg = tl.load(exp_avg_ptr + at, inside)
        exp_avg += share * (grad - exp_avg)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + at, inside)
        exp_avg_sq += share_sq * (grad * grad - exp_avg_sq)
        master = tl.load(master_ptr + at, inside)
        master -= tl.where(at < decayed, lr * weight_decay, 0.0) * master
        master -= step_size * exp_avg / (tl.sqrt(exp_avg_sq) / root_bias2 + eps)
        tl.store(exp_avg_ptr + at, exp_avg, inside)
        tl.store(exp_avg_sq_ptr + at, exp_avg_sq, inside)
        tl.store(master_ptr + at, master, inside)
        if has_value:
            tl.store(value_ptr + at, master.to(value_ptr.dtype.element_ty), inside)


def adamw(
    master: torch.Tensor,
    value: torch.Tensor | None,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    decayed: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: torch.Tensor,
    skip: torch.Tensor,
    bias: torch.Tensor,
) -> None:
    """Update 1-D tensors of one length in place.

    Args:
        value: the copy in the parameters' dtype, None where the master is it.
        decayed: how many elements, from the first, weight decay applies to.
        factor: float32 scalar that gradients are multiplied by. skip: float32 scalar, not 0 where nothing may change.
        bias: (2,) float32: 1 - beta1^t and the root of 1 - beta2^t.
    """
    if master.numel():
        _adamw[(triton.cdiv(master.numel(), BLOCK),)](
            master,
            master if value is None else value,
            grad,
            exp_avg,
            exp_avg_sq,
            factor,
            skip,
            bias,
            master.numel(),
            decayed,
            lr,
            *(1 - beta for beta in betas),  # here: of a beta near 1 float32 has too little to take it from 1
            eps,
            weight_decay,
            has_value=value is not None,
            block=BLOCK,
        )
