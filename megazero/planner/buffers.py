"""Bytes that come and go within a step: what is whole only while it is used, and what one operation needs.

Estimates of what is live at once, by operation; the allocator's rounding, the libraries' own workspaces (cuBLAS,
NCCL) and the device's context are not in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megazero.models import registry
from megazero.models.config import ModelConfig
from megazero.planner.activations import Kernels, Sizes, layer_bytes, loss_kept_bytes
from megazero.planner.model_state import Buffer
from megazero.tensor_parallel.cross_entropy import chunk_limit, chunk_size
from megazero.zero.flat import buckets
from megazero.zero.settings import ZeroSettings


def gathered_elements(sizes: Sequence[int], uses: Sequence[int], settings: ZeroSettings) -> int:
    """Most elements gathered at once over forward and backward at stage 3.

    ``sizes``: elements of each unit that come and go; ``uses``: units in the order of forward. A unit is let go of
    after its last use, and the next ones are fetched ahead of theirs as zero.sharded does.
    """
    if settings.keep_gathered or not settings.reshard_after_forward:
        return sum(sizes)
    order = [unit for unit in uses if sizes[unit]]
    return max(_gathered_in_pass(sizes, order, settings), _gathered_in_pass(sizes, order[::-1], settings))


def _gathered_in_pass(sizes: Sequence[int], order: Sequence[int], settings: ZeroSettings) -> int:
    left = Counter(order)
    whole: set[int] = set()
    most = 0
    for position, unit in enumerate(order):
        whole.add(unit)
        ahead = 0
        for following in order[position + 1 :]:
            one_is_fetched, ahead = ahead > 0, ahead + sizes[following]
            live = sum(sizes[i] for i in whole | {following})
            beyond = ahead > settings.prefetch_bucket_size and (one_is_fetched or not settings.prefetch_bucket_size)
            if beyond or live > settings.max_live_parameters:
                break
            whole.add(following)
        most = max(most, sum(sizes[i] for i in whole))
        left[unit] -= 1
        if not left[unit]:
            whole.discard(unit)
    return most


def unsharded_gradient_elements(buffers: Sequence[Buffer], bucket_size: int) -> int:
    """Most elements of whole gradients at stage 2 and above: one bucket being reduced while the next is filled."""
    sizes = bucket_elements(buffers[::-1], bucket_size)
    return max(a + b for a, b in zip(sizes, [*sizes[1:], 0]))


def bucket_elements(buffers: Sequence[Buffer], limit: int) -> list[int]:
    """Elements of each bucket of up to ``limit``."""
    sizes = [buffer.layout.numel for buffer in buffers]
    return [sum(sizes[i] for i in bucket) for bucket in buckets(sizes, limit)]


def loss_bytes(size: Sizes, kernel: Kernels) -> int:
    """What the chunked loss needs at once besides what it keeps: a chunk's logits, and the gradients it adds up.

    On a GPU, where the vocabulary is not cut, a chunk's logits are overwritten by their gradient. Elsewhere eager code
    holds two float32 copies at once (the logits less their maximum, and their exponentials, which become the gradient)
    and that gradient in the activations' dtype; compiled, only the product and the gradient are ever there, both in
    that dtype.
    """
    in_place = kernel.gpu and size.tp == 1
    chunk = chunk_size(size.tokens, size.vocab, chunk_limit(in_place))
    copies = 2 * kernel.element if kernel.compiled else 2 * 4 + (kernel.element if kernel.element < 4 else 0)
    if in_place:
        copies = kernel.element
    logits = chunk * size.vocab * copies
    weight, hidden = size.vocab * size.hidden, size.tokens * size.hidden
    sums = size.residual * kernel.element  # the hidden states themselves
    if size.outside < size.tokens:
        sums += hidden * kernel.element  # and those of all ranks
    if chunk < size.tokens:  # gradients of the weight add up in float32, those of hidden states are put together
        sums += weight * 4 + hidden * kernel.element
    if size.tp > 1:
        sums += 4 * (hidden + size.residual)
    return max(logits + sums - loss_kept_bytes(size, kernel), sums)


def layer_backward_bytes(model: ModelConfig, size: Sizes, kernel: Kernels) -> int:
    """What one layer's backward needs at once besides what forward kept, where that is most: in the MLP.

    The gradients of the residual stream, of a branch, of the inner features and of the MLP's last matrix, less what
    is done with by then.
    """
    inner = size.inner if registry.is_gated(model.activation) else size.ffn
    needed = (2 * size.residual + size.tokens * inner + size.hidden * size.ffn) * kernel.element
    if size.tp > 1:
        needed += 4 * (size.tokens * size.hidden + size.residual)
    return needed


def recomputed_bytes(model: ModelConfig, size: Sizes, kernel: Kernels, recompute: str, documents: bool) -> int:
    """What backward makes again of one layer."""
    whole = layer_bytes(model, size, kernel, "none", documents)
    return max(0, whole - layer_bytes(model, size, kernel, recompute, documents))
