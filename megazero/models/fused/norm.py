"""Layer normalisation of the residual stream, of the sum with a branch or of itself, and back with the gradients of its
weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from megazero.models.norm import LayerNorm

MOST_FEATURES = 4096  # of a norm whose row, with the sums of its column, fits the registers of a program


@triton.jit
def _norm_forward(
    x_ptr,
    branch_ptr,
    weight_ptr,
    bias_ptr,
    total_ptr,
    normed_ptr,
    mean_ptr,
    scale_ptr,
    features,
    eps,
    adds: tl.constexpr,
    width: tl.constexpr,
):
    row = tl.program_id(0)
    feature = tl.arange(0, width)
    inside = feature < features
    at = row.to(tl.int64) * features + feature
    x = tl.load(x_ptr + at, inside, other=0.0)
    if adds:
        x = x.to(tl.float32) + tl.load(branch_ptr + at, inside, other=0.0).to(tl.float32)
        x = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, x, inside)
    x = x.to(tl.float32)
    mean = tl.sum(x, 0) / features
    x = tl.where(inside, x - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(x * x, 0) / features + eps)
    weight = tl.load(weight_ptr + feature, inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + feature, inside, other=0.0).to(tl.float32)
    tl.store(normed_ptr + at, (x * scale * weight + bias).to(normed_ptr.dtype.element_ty), inside)
    tl.store(mean_ptr + row, mean)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _norm_backward(
    grad_sum_ptr,
    grad_normed_ptr,
    sum_ptr,
    mean_ptr,
    scale_ptr,
    weight_ptr,
    out_ptr,
    weight_sums_ptr,
    bias_sums_ptr,
    rows,
    features,
    rows_each,
    width: tl.constexpr,
):
    feature = tl.arange(0, width)
    inside = feature < features
    weight = tl.load(weight_ptr + feature, inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((width,), tl.float32)
    bias_sum = tl.zeros((width,), tl.float32)
    first = tl.program_id(0) * rows_each
    at = first.to(tl.int64) * features + feature
    for row in range(first, tl.minimum(first + rows_each, rows)):
        grad = tl.load(grad_normed_ptr + at, inside, other=0.0).to(tl.float32)
        x = tl.load(sum_ptr + at, inside, other=0.0).to(tl.float32)
        passed = tl.load(grad_sum_ptr + at, inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row)
        x = tl.where(inside, (x - tl.load(mean_ptr + row)) * scale, 0.0)
        weight_sum += grad * x
        bias_sum += grad
        grad *= weight
        along, plain = tl.sum(grad * x, 0) / features, tl.sum(grad, 0) / features
        out = passed + (grad - plain - x * along) * scale
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), inside)
        at += features
    partial = tl.program_id(0) * features + feature
    tl.store(weight_sums_ptr + partial, weight_sum, inside)
    tl.store(bias_sums_ptr + partial, bias_sum, inside)


def _forward(
    x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum (or x), that normalised, and of each row the mean and the reciprocal deviation."""
    rows, features = x.shape
    x, adds = x.contiguous(), branch is not None
    weight, bias = weight.contiguous(), bias.contiguous()
    branch = x if branch is None else branch.contiguous()
    total = torch.empty_like(x) if adds else x
    normed = torch.empty_like(x)
    mean = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    scale = torch.empty_like(mean)
    width = triton.next_power_of_2(features)
    wrap_triton(_norm_forward)[(rows,)](
        x,
        branch,
        weight,
        bias,
        total,
        normed,
        mean,
        scale,
        features,
        eps,
        adds=adds,
        width=width,
        num_warps=4,
    )
    return total, normed, mean, scale


@triton_op("megazero::add_norm", mutates_args={})
def _add_norm(
    x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _forward(x, branch, weight, bias, eps)


@triton_op("megazero::norm", mutates_args={})
def _norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _forward(x, None, weight, bias, eps)[1:]


@triton_op("megazero::add_norm_backward", mutates_args={})
def _add_norm_backward(
    grad_total: torch.Tensor,
    grad_normed: torch.Tensor,
    total: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, features = total.shape
    width = triton.next_power_of_2(features)
    rows_each = max(8, triton.cdiv(rows, 1024))
    programs = triton.cdiv(rows, rows_each)
    out = torch.empty_like(total)
    weight_sums = torch.empty(programs, features, dtype=torch.float32, device=total.device)
    bias_sums = torch.empty_like(weight_sums)
    wrap_triton(_norm_backward)[(programs,)](
        grad_total,
        grad_normed,
        total,
        mean,
        scale,
        weight,
        out,
        weight_sums,
        bias_sums,
        rows,
        features,
        rows_each,
        width=width,
        num_warps=4 if width <= 1024 else 8,
    )
    return out, weight_sums, bias_sums


def _gradients(grad_total, grad_normed, total, mean, scale, weight):
    grad, weight_sums, bias_sums = torch.ops.megazero.add_norm_backward(
        grad_total.contiguous(), grad_normed.contiguous(), total.contiguous(), mean, scale, weight.contiguous()
    )
    return grad, weight_sums.sum(0).to(weight.dtype), bias_sums.sum(0).to(weight.dtype)


def _save(ctx, inputs, output):
    total, _, mean, scale = output
    ctx.save_for_backward(total, mean, scale, inputs[2])
    ctx.set_materialize_grads(True)


def _backward(ctx, grad_total, grad_normed, grad_mean, grad_scale):
    grad, grad_weight, grad_bias = _gradients(grad_total, grad_normed, *ctx.saved_tensors)
    return grad, grad, grad_weight, grad_bias, None


_add_norm.register_autograd(_backward, setup_context=_save)


class _NormBeside(torch.autograd.Function):
    """x, and x normalised. That x passes through has the gradients of both added up where the second's is made."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        normed, mean, scale = torch.ops.megazero.norm(x, weight, bias, eps)
        ctx.save_for_backward(x, mean, scale, weight)
        return x.view_as(x), normed

    @staticmethod
    def backward(ctx, grad_total, grad_normed):
        return *_gradients(grad_total, grad_normed, *ctx.saved_tensors), None


def add_norm(x: torch.Tensor, branch: torch.Tensor | None, norm: LayerNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, H), and what a branch adds to it if there is one → their sum, and that under ``norm``, in their dtype."""
    if branch is None:
        return _NormBeside.apply(x, norm.weight, norm.bias, norm.eps)
    # What a sum would repeat for every row, the kernel would look for behind the one that is there.
    total, normed, _, _ = _add_norm(x, branch.expand_as(x), norm.weight, norm.bias, norm.eps)
    return total, normed
