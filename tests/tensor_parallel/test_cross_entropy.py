"""Output projection and cross-entropy in one, against torch's own in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist

from megazero.tensor_parallel.cross_entropy import CHUNK_ELEMENTS, chunk_loss, chunk_size, linear_cross_entropy
from megazero.tensor_parallel.mappings import TensorParallel

TOKENS, HIDDEN = 24, 8


def inputs(vocab_size: int, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Hidden states, weight, targets (both ends of the vocabulary among them), token weights (some 0)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=generator) * scale
    weight = torch.randn(vocab_size, HIDDEN, generator=generator)
    targets = torch.randint(vocab_size, (TOKENS,), generator=generator)
    targets[0], targets[1] = 0, vocab_size - 1
    token_weights = torch.rand(TOKENS, generator=generator) * (torch.rand(TOKENS, generator=generator) < 0.8)
    return x, weight, targets, token_weights


def truth(x, weight, targets, token_weights, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, gradient of x, gradient of the weight) in float64; the gradients are of ``factor`` · loss."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    loss = (F.cross_entropy(x @ weight.t(), targets, reduction="none") * token_weights.double()).sum()
    (loss * factor).backward()
    return loss.detach(), x.grad, weight.grad


def check(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert float((ours.detach().double() - theirs).norm()) <= 2e-6 * float(theirs.norm())


def one_rank_loss(x, weight, targets, token_weights, valid: int = 37, **options) -> torch.Tensor:
    return linear_cross_entropy(x, weight, targets, token_weights, 0, valid, TensorParallel(), **options)


@pytest.mark.parametrize("limit", [1, 37 * 5, CHUNK_ELEMENTS])
@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("scale", [1.0, 200.0])
def test_one_rank(limit: int, padding: int, scale: float) -> None:
    """In chunks or not, with rows past the vocabulary that would win the softmax, with logits in the thousands."""
    x, weight, targets, token_weights = inputs(37, scale)
    padded = torch.cat((weight, torch.full((padding, HIDDEN), 1e4))).requires_grad_()
    hidden = x.clone().requires_grad_()
    loss = one_rank_loss(hidden, padded, targets, token_weights, limit=limit)
    (loss * 0.25).backward()
    expected = truth(x, weight, targets, token_weights, 0.25)
    assert loss.dtype == torch.float32
    check(loss, expected[0])
    check(hidden.grad, expected[1])
    check(padded.grad[:37], expected[2])
    assert not padded.grad[37:].any()


@pytest.mark.parametrize("limit", [37 * 5, CHUNK_ELEMENTS])
def test_chunks_cover_every_token_within_the_limit(limit: int) -> None:
    sizes = []

    def counting(x_CH, *rest):
        sizes.append(len(x_CH))
        return chunk_loss(x_CH, *rest)

    one_rank_loss(*inputs(37), chunk_fn=counting, limit=limit)
    assert sum(sizes) == TOKENS
    assert max(sizes) * 37 <= limit
    assert len(sizes) == -(-TOKENS * 37 // limit)


def test_without_gradients_the_same_loss() -> None:
    x, weight, targets, token_weights = inputs(37)
    with torch.no_grad():
        loss = one_rank_loss(x, weight, targets, token_weights)
    assert not loss.requires_grad
    check(loss, truth(x, weight, targets, token_weights)[0])
    trained = one_rank_loss(x.requires_grad_(), weight, targets, token_weights)
    assert trained.requires_grad and torch.equal(trained.detach(), loss)


def test_gradients_of_a_graph_that_is_kept_are_there_again() -> None:
    x, weight, targets, token_weights = inputs(37)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = one_rank_loss(*leaves, targets, token_weights)
    for factor, keeps in ((0.5, True), (0.25, True), (3.0, False)):
        found = torch.autograd.grad(factor * loss, leaves, retain_graph=keeps)
        for ours, theirs in zip(found, truth(x, weight, targets, token_weights, factor)[1:], strict=True):
            check(ours, theirs)


def test_an_evaluation_makes_no_gradients() -> None:
    x, weight, targets, token_weights = inputs(37)
    asked = []

    def noting(*given):
        asked.append(given[-1])
        return chunk_loss(*given)

    with torch.no_grad():
        one_rank_loss(x, weight.requires_grad_(), targets, token_weights, chunk_fn=noting)
    assert asked == [False]
    one_rank_loss(x, weight, targets, token_weights, chunk_fn=noting).backward()
    assert asked == [False, True]
    check(weight.grad, truth(x, weight.detach(), targets, token_weights)[2])


def test_tokens_without_weight_change_nothing() -> None:
    x, weight, targets, _ = inputs(37)
    hidden, matrix = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = one_rank_loss(hidden, matrix, targets, torch.zeros(TOKENS))
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any() and not matrix.grad.any()


def test_chunks_in_bf16_add_up_in_float32() -> None:
    """The weight's gradient is the sum over 512 chunks of the same token, rounded once."""
    weight = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    x = torch.ones(512, HIDDEN, dtype=torch.bfloat16)
    targets, token_weights = torch.zeros(512, dtype=torch.int64), torch.full((512,), 2.0**-9)
    one_rank_loss(x, weight, targets, token_weights, valid=5, limit=5).backward()
    alone = weight.detach().clone().requires_grad_()
    one_rank_loss(x[:1], alone, targets[:1], torch.ones(1), valid=5).backward()
    assert torch.equal(weight.grad, alone.grad)


def on_a_rank(vocab_size: int, rows: int, limit: int, scale: float, sequence: bool) -> tuple[torch.Tensor, ...]:
    """Loss, gradient of the rank's tokens, gradient of its rows, and of those past the vocabulary."""
    tp = TensorParallel(dist.get_world_size(), dist.get_rank(), sequence, dist.group.WORLD)
    x, weight, targets, token_weights = inputs(vocab_size, scale)
    start = min(tp.rank * rows, vocab_size)
    valid = min(rows, vocab_size - start)
    local = torch.full((rows, HIDDEN), 1e4)
    local[:valid] = weight[start : start + valid]
    local.requires_grad_()
    x = tp.slice_tokens(x).clone().requires_grad_()
    loss = linear_cross_entropy(x, local, targets, token_weights, start, valid, tp, limit=limit)
    loss.backward()
    return loss.detach(), x.grad, local.grad[:valid], local.grad[valid:]


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(
    ("vocab_size", "ranks_count", "rows"),
    [(37, 2, 19), (37, 4, 10), (37, 4, 64), (5, 4, 2), (3, 4, 1)],
    ids=["last_one_short", "four", "all_on_one", "none_on_the_last", "one_row_each"],
)
def test_a_vocabulary_cut_between_ranks(
    ranks: Callable, vocab_size: int, ranks_count: int, rows: int, sequence: bool
) -> None:
    for limit, scale in ((CHUNK_ELEMENTS, 1.0), (rows * 5, 200.0)):
        results = ranks(ranks_count, on_a_rank, vocab_size, rows, limit, scale, sequence)
        loss, grad_x, grad_weight = truth(*inputs(vocab_size, scale))
        for found, *_ in results:
            assert torch.equal(found, results[0][0])
            check(found, loss)
        if sequence:
            check(torch.cat([result[1] for result in results]), grad_x)
        else:
            assert all(torch.equal(result[1], results[0][1]) for result in results)
            check(results[0][1], grad_x)
        check(torch.cat([result[2] for result in results]), grad_weight)
        assert not any(result[3].any() for result in results)


@pytest.mark.parametrize(
    ("tokens", "rows", "limit", "chunk"),
    [
        (65536, 50304, 1 << 28, 4096),  # 13 chunks would do, 16 are whole tiles
        (8192, 128256, 1 << 28, 2048),
        (4096, 50304, 1 << 28, 4096),  # one chunk
        (1000, 100, 30_000, 250),  # no whole tiles: as few as the limit allows
        (7, 100, 250, 3),  # the last chunk is smaller
        (5, 100, 1, 1),  # the limit is below one token's logits
    ],
)
def test_chunks_are_equal_tiles_within_the_limit(tokens: int, rows: int, limit: int, chunk: int) -> None:
    assert chunk_size(tokens, rows, limit) == chunk
