"""Seconds that one GPU computes for a micro-batch: matrix products by their shapes, attention, and what crosses memory.

Pointwise work is counted in passes over memory of fused kernels, as torch.compile makes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megazero.models import registry
from megazero.models.config import ModelConfig
from megazero.planner.activations import Sizes
from megazero.planner.chips import Chip
from megazero.planner.practice import MEGAZERO, Practice
from megazero.tensor_parallel.cross_entropy import chunk_limit, chunk_size

ELEMENT = 2  # bytes of an activation or parameter in 16 bits


class Pass(NamedTuple):
    """Seconds of one micro-batch's forward and backward."""

    forward: float
    backward: float

    def __add__(self, other: tuple[float, float]) -> Pass:  # type: ignore[override]
        return Pass(self.forward + other[0], self.backward + other[1])

    def times(self, count: float) -> Pass:
        return Pass(self.forward * count, self.backward * count)


def total(passes: Iterable[Pass]) -> Pass:
    """The sum of several."""
    forward, backward = 0.0, 0.0
    for one in passes:
        forward, backward = forward + one.forward, backward + one.backward
    return Pass(forward, backward)


class Machine:
    """Times operations on one chip; ``practice``: how the program does them."""

    def __init__(self, chip: Chip, practice: Practice = MEGAZERO) -> None:
        self.chip, self.practice = chip, practice
        self.product_flops = chip.peak_flops * chip.efficiency.matmul
        self.memory_bandwidth = chip.memory_bandwidth * chip.efficiency.memory
        self._layers: dict[tuple[ModelConfig, Sizes, str], Pass] = {}

    def product(self, rows: int, columns: int, inner: int) -> float:
        """(rows, inner) @ (inner, columns)."""
        edge = self.chip.efficiency.matmul_edge
        flops = 2 * rows * columns * inner * (1 + edge * (1 / rows + 1 / columns + 1 / inner))
        crossing = ELEMENT * (rows * columns + rows * inner + columns * inner)
        return max(flops / self.product_flops, self.moved(crossing)) + self.chip.efficiency.kernel

    def linear(self, tokens: int, outputs: int, inputs: int) -> Pass:
        """A layer's product with a weight, and those of its gradients."""
        return Pass(
            self.product(tokens, outputs, inputs),
            self.product(tokens, inputs, outputs) + self.product(outputs, inputs, tokens),
        )

    def layer(self, model: ModelConfig, size: Sizes, recompute: str) -> Pass:
        """``layer_seconds``, remembered."""
        key = (model, size, recompute)
        if key not in self._layers:
            self._layers[key] = layer_seconds(self, model, size, recompute)
        return self._layers[key]

    def moved(self, crossing: float) -> float:
        """Bytes that cross memory."""
        return crossing / self.memory_bandwidth

    def pointwise(self, elements: float, kernels: int) -> float:
        """Passes over 16-bit elements."""
        return self.practice.passes * (self.moved(ELEMENT * elements) + kernels * self.chip.efficiency.kernel)


def layer_seconds(machine: Machine, model: ModelConfig, size: Sizes, recompute: str) -> Pass:
    """One transformer layer's."""
    tokens, hidden = size.tokens, size.hidden
    products = [
        machine.linear(tokens, size.qkv, hidden),
        machine.linear(tokens, hidden, size.query),
        machine.linear(tokens, size.inner, hidden),
        machine.linear(tokens, hidden, size.ffn),
    ]
    matrices = total(products)
    attention = attention_seconds(machine, model, size)
    pointwise = _pointwise(machine, model, size)
    whole = matrices + attention + pointwise
    if recompute == "full":
        # The compiler leaves out what backward does not need, where collectives do not hide it from it.
        last = 0.0 if machine.practice.recomputes_all or size.tp > 1 else products[-1].forward
        return whole + (0.0, whole.forward - last)
    if recompute == "selective":
        again = pointwise.forward + machine.practice.repeated_products * matrices.forward
        if machine.practice.stores_scores:
            again += attention.forward  # all that those who store scores recompute is attention
        return whole + (0.0, again)
    return whole


def attention_seconds(machine: Machine, model: ModelConfig, size: Sizes) -> Pass:
    """Queries, keys and values → the heads' outputs."""
    if machine.practice.stores_scores:
        return _stored_attention(machine, model, size)
    length = size.seq_length
    window = min(model.sliding_window or length, length)
    seen = window - window * window / (2 * length)  # positions that one sees in the mean
    flops = 4 * size.tokens * size.query * seen
    # A tile's softmax is spread over a head's features; short sequences are mostly the diagonal's half-empty tiles.
    head = (1 + _HEAD / model.head_size) / (1 + _HEAD / 128)
    rate = machine.chip.peak_flops * machine.chip.efficiency.attention * machine.practice.attention
    seconds = flops / rate * head * (1 + _LENGTH / seen) + machine.chip.efficiency.kernel
    return Pass(seconds, 2 * seconds)


_HEAD = 64  # features
_LENGTH = 128  # positions


def _stored_attention(machine: Machine, model: ModelConfig, size: Sizes) -> Pass:
    """As batched products over whole squares, with softmax and dropout over the scores between them."""
    batch, length, width = size.sequences * size.heads, size.seq_length, model.head_size
    one = batch * 2 * length * length * width / machine.product_flops
    one *= 1 + machine.chip.efficiency.matmul_edge * (2 / length + 1 / width)
    scores = machine.moved(ELEMENT * batch * length * length)
    return Pass(2 * one + 5 * scores, 4 * one + 6 * scores)


def _pointwise(machine: Machine, model: ModelConfig, size: Sizes) -> Pass:
    """Norms, residuals, positions, activation and biases. A pass reads or writes every element once."""
    tokens, residual = size.tokens, size.residual
    turned = tokens * (size.query + size.key_value) if model.position == "rotary" else 0
    # Each norm reads the stream and the branch that is added, and writes the sum and its norm.
    forward = 8 * residual + 2 * turned + tokens * (size.inner + size.ffn)
    activation = 2 * size.inner + size.ffn * (2 if registry.is_gated(model.activation) else 1)
    backward = 8 * residual + 2 * turned + tokens * (2 * size.qkv + activation)
    if model.mlp_bias:
        backward += tokens * (size.inner + size.hidden)
    if model.qkv_bias:
        backward += tokens * size.qkv
    if model.out_bias:
        backward += tokens * size.hidden
    if size.tp > 1:
        # Partial sums are added up, and written, in their own dtype.
        wider = 2 * (machine.practice.partial_sum_bytes / ELEMENT - 1) * (tokens * size.hidden + residual)
        forward, backward = forward + wider, backward + wider
    return Pass(machine.pointwise(forward, 8), machine.pointwise(backward, 16))


def embedding_seconds(machine: Machine, size: Sizes) -> Pass:
    """Rows read, and their gradients added to a matrix of zeros."""
    rows = size.tokens * size.hidden
    return Pass(machine.pointwise(2 * rows, 3), machine.pointwise(3 * rows + size.vocab * size.hidden, 4))


def head_seconds(machine: Machine, size: Sizes) -> Pass:
    """Final norm, output projection and loss. The gradients of all are made in forward, where the logits are."""
    products = machine.linear(size.tokens, size.vocab, size.hidden)
    logits = machine.moved(machine.practice.logit_bytes * size.tokens * size.vocab)
    norm = machine.pointwise(4 * size.residual, 2)
    if machine.practice.loss_has_backward:
        return products + (norm + logits / 2, norm + logits / 2)
    chunk = chunk_size(size.tokens, size.vocab, chunk_limit(in_place=size.tp == 1))
    chunks = -(-size.tokens // chunk)
    sums = machine.moved(8 * size.vocab * size.hidden * chunks) if chunks > 1 else 0.0
    scaled = machine.pointwise(2 * (size.residual + size.vocab * size.hidden), 2)
    return Pass(products.forward + products.backward + logits + sums + norm, scaled + norm)


def gradient_seconds(machine: Machine, parameters: int, grad_bytes: int, adds: bool, recompute: str) -> float:
    """Gradients moved from where autograd leaves them into the flat buffer, or made there; ``adds``: to others."""
    fuses = machine.practice.fuses_gradient
    if fuses == "always" or (fuses == "without recompute" and recompute == "none"):
        return machine.moved(parameters * grad_bytes * (2 if adds else 1))
    return machine.moved(parameters * (ELEMENT + grad_bytes * (2 if adds else 1)))


def update_seconds(machine: Machine, parameters: int, grad_bytes: int) -> float:
    """The norm of ``parameters`` gradients, and AdamW in one pass: gradient, master and two moments in, the latter
    three and the 16-bit value out."""
    return machine.moved(parameters * (grad_bytes + grad_bytes + 6 * 4 + ELEMENT))
