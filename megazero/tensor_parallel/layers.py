"""The model's matrices cut between the ranks of a tensor-parallel group (Shoeybi et al. 2019, arXiv 1909.08053).

Each class is made from the plain module of the same role in ``models.layers``, keeps its call signature, and
describes its local parameters by ShardSpec.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megazero.models.layers import Head, PositionEmbedding, ProjectIn, ProjectOut, WordEmbedding, repeat_rows
from megazero.sharding import Piece, Rectangle, Replication, ShardSpec, whole
from megazero.tensor_parallel.cross_entropy import chunk_loss, linear_cross_entropy
from megazero.tensor_parallel.linear import column_linear, leave_region, row_linear
from megazero.tensor_parallel.mappings import TensorParallel
from megazero.tensor_parallel.weight_products import ProbedLinear, probed_linear


def replicated(spec: ShardSpec, tp: TensorParallel, partial: bool) -> ShardSpec:
    """``spec`` held by every rank of the tensor-parallel group."""
    if tp.size == 1:
        return spec
    return spec.replicated_over(Replication("tp", tuple(range(tp.size)), "partial" if partial else "equal"))


class ColumnParallelLinear(ProbedLinear):
    """ProjectIn with its output features cut: a whole number of units of every part on each rank.

    A part of fewer units than ranks (key/value heads, say) has each unit on tp/units neighbouring ranks, whose
    gradients are partial: each rank's query heads contribute their own.
    """

    def __init__(self, plain: ProjectIn, path: str, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.sizes: list[int] = []
        prefix = path.rpartition(".")[0]
        columns, row = [], 0  # (part name, global features, first, local features, first local row, replication)
        for part in plain.parts:
            if part.units % tp.size == 0:
                units, first, replication = part.units // tp.size, tp.rank * (part.units // tp.size), ()
            else:
                assert tp.size % part.units == 0, (path, part, tp.size)
                copies = tp.size // part.units
                units, first = 1, tp.rank // copies
                members = tuple(range(first * copies, (first + 1) * copies))
                replication = (Replication("tp", members, "partial"),)
            size = units * part.unit_size
            columns.append((f"{prefix}.{part.name}", part.size, first * part.unit_size, size, row, replication))
            self.sizes.append(size)
            row += size

        def spec(attribute: str, trailing: tuple[int, ...]) -> ShardSpec:
            zeros = (0,) * len(trailing)
            pieces = tuple(
                Piece(
                    f"{name}.{attribute}", (features, *trailing), Rectangle((first, *zeros), (size, *trailing)), at, r
                )
                for name, features, first, size, at, r in columns
            )
            return ShardSpec((row, *trailing), pieces)

        self.weight = nn.Parameter(torch.empty(row, plain.in_features, device="meta"))
        self.bias = nn.Parameter(torch.empty(row, device="meta")) if plain.bias is not None else None
        self.specs = {"weight": spec("weight", (plain.in_features,))}
        if self.bias is not None:
            self.specs["bias"] = spec("bias", ())

    def forward(self, x_TH: torch.Tensor, with_bias: bool = True) -> tuple[torch.Tensor, ...]:
        """(T or T/tp, H) → one (T, local features) per part. ``with_bias``: false: the caller adds it."""
        bias = self.bias if with_bias else None
        if self.is_probed(x_TH, column=True):
            return probed_linear(self, x_TH, bias, self.sizes, column=True)
        return column_linear(x_TH, self.weight, bias, self.tp).split(self.sizes, dim=-1)


class RowParallelLinear(ProbedLinear):
    """ProjectOut with its input features cut. The bias is added once, after the sum over ranks."""

    def __init__(self, plain: ProjectOut, path: str, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        local, shape = plain.in_features // tp.size, (plain.out_features, plain.in_features)
        assert local * tp.size == plain.in_features, (path, plain.in_features, tp.size)
        box = Rectangle((0, tp.rank * local), (plain.out_features, local))
        self.weight = nn.Parameter(torch.empty(plain.out_features, local, device="meta"))
        self.bias = nn.Parameter(torch.empty(plain.out_features, device="meta")) if plain.bias is not None else None
        self.specs = {"weight": ShardSpec(box.shape, (Piece(f"{path}.weight", shape, box),))}
        if self.bias is not None:
            # Under sequence parallelism each rank adds it to its own tokens only.
            self.specs["bias"] = replicated(whole(f"{path}.bias", (plain.out_features,)), tp, tp.sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(T, local features) → (T or T/tp, H)."""
        if self.is_probed(x, column=False):
            (y,) = probed_linear(self, x, self.bias, [self.weight.shape[0]], column=False)
            return y
        return row_linear(x, self.weight, self.bias, self.tp)


class _VocabularyRows(nn.Module):
    """A (V, H) matrix cut by rows, each rank's number of them rounded up; rows past the vocabulary are padding."""

    def __init__(self, vocab_size: int, hidden_size: int, name: str, tp: TensorParallel, multiple: int) -> None:
        super().__init__()
        self.tp = tp
        rows = -(-vocab_size // tp.size)
        rows = -(-rows // multiple) * multiple
        self.start = min(tp.rank * rows, vocab_size)
        self.valid = min(rows, vocab_size - self.start)
        self.weight = nn.Parameter(torch.empty(rows, hidden_size, device="meta"))
        box = Rectangle((self.start, 0), (self.valid, hidden_size))
        pieces = (Piece(name, (vocab_size, hidden_size), box),) if self.valid else ()
        self.specs = {"weight": ShardSpec((rows, hidden_size), pieces)}


class VocabParallelEmbedding(_VocabularyRows):
    """WordEmbedding with the vocabulary cut between ranks."""

    def __init__(self, plain: WordEmbedding, path: str, tp: TensorParallel, multiple: int) -> None:
        super().__init__(plain.vocab_size, plain.hidden_size, f"{path}.weight", tp, multiple)

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """(T,) int64 → (T or T/tp, H)."""
        if self.tp.size == 1:
            return F.embedding(tokens_T, self.weight)
        local_T = tokens_T - self.start
        here_T = (local_T >= 0) & (local_T < self.valid)
        x_TH = F.embedding(torch.where(here_T, local_T, 0), self.weight)
        return leave_region(x_TH * here_T[:, None].to(x_TH.dtype), self.tp)


class VocabParallelHead(_VocabularyRows):
    """Head and cross-entropy with the vocabulary cut between ranks: gives the loss, never all logits."""

    def __init__(self, plain: Head, name: str, tp: TensorParallel, multiple: int) -> None:
        super().__init__(plain.vocab_size, plain.hidden_size, name, tp, multiple)
        self.chunk_loss = chunk_loss

    def forward(self, x_TH: torch.Tensor, targets_T: torch.Tensor, weights_T: torch.Tensor) -> torch.Tensor:
        """Hidden states (T or T/tp, H), targets (T,) int64, weights (T,) float32 → Σ weight · loss, a scalar."""
        return linear_cross_entropy(
            x_TH, self.weight, targets_T, weights_T, self.start, self.valid, self.tp, self.chunk_loss
        )


class SlicedPositionEmbedding(nn.Module):
    """PositionEmbedding, whole on every rank, looked up for the rank's own tokens only."""

    def __init__(self, plain: PositionEmbedding, path: str, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        shape = (plain.max_positions, plain.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, device="meta"))
        self.specs = {"weight": replicated(whole(f"{path}.weight", shape), tp, tp.sequence_parallel)}

    def forward(self, positions: torch.Tensor, tokens: int) -> torch.Tensor:
        """int64 (S,), of each sequence, or (T,) → (T or T/tp, H)."""
        own = self.tp.local_tokens(tokens)
        if own % positions.numel():  # a rank's tokens are no whole sequences
            positions = self.tp.slice_tokens(positions.repeat(tokens // positions.numel()))
        return repeat_rows(F.embedding(positions, self.weight), own)
