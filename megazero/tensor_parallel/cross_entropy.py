"""Output projection and cross-entropy over a vocabulary cut between ranks, without ever holding all logits.

Tokens go through in chunks. The gradient of a chunk's logits is known as soon as its loss is, so the
gradients of hidden states and weight are formed in the forward pass and only scaled in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup

from megazero import comm
from megazero.tensor_parallel.mappings import (
    TensorParallel,
    add_product,
    gather_tokens,
    partial_product,
    rounded,
    sum_over_ranks,
)

TILE = 256  # tokens
CHUNK_ELEMENTS = 1 << 28  # logits per chunk: 512 MiB in bfloat16, where there are two copies of them


def chunk_loss(
    x_CH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_C: torch.Tensor,
    weights_C: torch.Tensor,
    start: int,
    valid: int,
    group: ProcessGroup | None,
    with_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss (C,) float32 and gradient of the logits (C, V) in the dtype of ``x_CH``; V is the local vocabulary.

    Rows of ``weight_VH`` from ``valid`` on are padding and take no part in the softmax. The loss is
    computed with the maximum over all ranks taken off, each token's times its weight.
    """
    logits_CV = (x_CH @ weight_VH.t()).float()
    if valid < weight_VH.shape[0]:
        column = torch.arange(weight_VH.shape[0], device=x_CH.device)
        logits_CV = logits_CV.masked_fill(column >= valid, float("-inf"))
    maximum_C = logits_CV.amax(-1)
    if group is not None:
        maximum_C = comm.all_reduce(maximum_C, group, "max")
    logits_CV -= maximum_C[:, None]
    exp_CV = logits_CV.exp()
    local_C = targets_C - start
    here_C = (local_C >= 0) & (local_C < valid)
    index_C1 = local_C.clamp(0, weight_VH.shape[0] - 1)[:, None]
    indexed_C = logits_CV.gather(1, index_C1)[:, 0]
    sums_2C = torch.stack((exp_CV.sum(-1), torch.where(here_C, indexed_C, 0.0)))
    if group is not None:
        sums_2C = comm.all_reduce(sums_2C, group)
    loss_C = (sums_2C[0].log() - sums_2C[1]) * weights_C
    if not with_grad:
        return loss_C, logits_CV.new_empty(0)
    scale_C = weights_C / sums_2C[0]
    grad_CV = exp_CV.mul_(scale_C[:, None]).to(x_CH.dtype)
    # Put there last: a scatter into float32 would keep the compiler from ever having all of it in 16 bits alone.
    grad_C = indexed_C.exp() * scale_C - torch.where(here_C, weights_C, 0.0)
    return loss_C, grad_CV.scatter_(1, index_C1, grad_C[:, None].to(x_CH.dtype))


def chunk_limit(in_place: bool) -> int:
    """Most logits held at once; ``in_place``: their gradient takes their place."""
    return CHUNK_ELEMENTS * (2 if in_place else 1)


def chunk_size(tokens: int, rows: int, limit: int) -> int:
    """Tokens per chunk, so that their logits are at most ``limit``: equal chunks that fill matrix kernels' tiles, where
    at most twice the fewest chunks allow them."""
    fewest = -(-tokens * rows // limit)
    for chunks in range(fewest, min(2 * fewest, tokens) + 1):
        if tokens % (chunks * TILE) == 0:
            return tokens // chunks
    return -(-tokens // fewest)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, weight_VH, targets_T, weights_T, start, valid, tp, chunk_fn, limit, with_grad):
        group = tp.group
        full_TH = x_TH if group is None else gather_tokens(x_TH, group, tp.sequence_parallel)
        tokens, rows = full_TH.shape[0], weight_VH.shape[0]
        chunk = chunk_size(tokens, rows, limit)
        several = chunk < tokens
        loss = torch.zeros((), dtype=torch.float32, device=x_TH.device)
        # Sums over chunks, and over ranks, are kept in float32 and rounded once.
        grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if with_grad and several else None
        grad_x = []
        for i in range(0, tokens, chunk):
            x_CH, part = full_TH[i : i + chunk], slice(i, i + chunk)
            loss_C, grad_CV = chunk_fn(
                x_CH, weight_VH, targets_T[part], weights_T[part], start, valid, group, with_grad
            )
            loss += loss_C.sum()
            if not with_grad:
                continue
            grad_x.append(grad_CV @ weight_VH if group is None else partial_product(grad_CV, weight_VH))
            if several:
                add_product(grad_weight, grad_CV.t(), x_CH)
            else:
                grad_weight = grad_CV.t() @ x_CH
            del grad_CV  # or it would be there beside the next chunk's logits
        if with_grad:
            grad_TH = torch.cat(grad_x) if several else grad_x[0]
            if group is not None:
                grad_TH = sum_over_ranks(grad_TH, group, tp.sequence_parallel)
            ctx.save_for_backward(rounded(grad_TH, x_TH.dtype), rounded(grad_weight, weight_VH.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad):
        gradients = ctx.saved_tensors
        if torch._C._autograd._get_current_graph_task_keep_graph():  # they are asked for again
            return *(gradient * grad for gradient in gradients), *([None] * 8)
        # In place, and by vectorised kernels: a product with a tensor of no dims goes element by element.
        torch._foreach_mul_(gradients, grad.to(gradients[0].dtype))
        return *gradients, *([None] * 8)


def linear_cross_entropy(
    x_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_T: torch.Tensor,
    weights_T: torch.Tensor,
    start: int,
    valid: int,
    tp: TensorParallel,
    chunk_fn: Callable[..., tuple[torch.Tensor, torch.Tensor]] = chunk_loss,
    limit: int | None = None,
) -> torch.Tensor:
    """Σ weight · cross-entropy over all tokens, a float32 scalar, the same on every tensor-parallel rank.

    Args:
        x_TH: hidden states (T or T/tp, H), as a rank holds them outside the tensor-parallel region.
        weight_VH: this rank's vocabulary rows; row i is token ``start`` + i, rows from ``valid`` on padding.
        targets_T: int64 token ids of all T tokens; weights_T: float32, 0 takes a token out of the loss.
        chunk_fn: ``chunk_loss`` or a compiled form of it; one kernel takes its place on a GPU, where the vocabulary is
            not cut. ``limit``: most logits held at once, ``chunk_limit`` by default.
    """
    in_place = x_TH.is_cuda and tp.size == 1
    if in_place:
        from megazero.tensor_parallel import loss_kernel  # triton comes with torch's CUDA builds only

        chunk_fn = loss_kernel.chunk_loss
    limit = chunk_limit(in_place) if limit is None else limit
    # Asked here: what a Function is told it needs are gradients of a parameter under no_grad as well.
    with_grad = torch.is_grad_enabled() and (x_TH.requires_grad or weight_VH.requires_grad)
    return _LinearCrossEntropy.apply(
        x_TH, weight_VH, targets_T, weights_T, start, valid, tp, chunk_fn, limit, with_grad
    )
