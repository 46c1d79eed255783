"""Continues prompts, token by token, on every rank of a layout."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megazero import comm
from megazero.errors import ConfigError, DivergenceError
from megazero.generation.cache import KeyValueCache
from megazero.generation.limits import check_prompts
from megazero.generation.sampling import Sampling, choose, uniform
from megazero.models.context import Context, ContextBuilder
from megazero.models.gpt import GPT
from megazero.pipeline.p2p import Transfers
from megazero.tensor_parallel.mappings import TensorParallel
from megazero.topology import Topology
from megazero.zero.sharded import ShardedModel

OnToken = Callable[[int, int, bool], bool]
"""(prompt's index, its next token, whether that is its last) → whether to end there; the same on every rank."""


@dataclass
class _Row:
    """One prompt under way."""

    index: int
    prompt: Sequence[int]
    new: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.new)


@dataclass(frozen=True)
class _Request:
    max_new_tokens: int
    sampling: Sampling
    stop_tokens: Collection[int]
    vocab_size: int
    on_token: OnToken | None


class Generator:
    """Runs one rank's share of a decoder. Every rank makes the same calls and gets the same tokens.

    ``model``: the rank's pipeline stage, tensor-parallel as ``topology`` says. ``sharded``: what holds its parameters,
    where ZeRO does: each is gathered when its module is called. Data-parallel replicas all do the same.
    """

    def __init__(self, model: GPT, topology: Topology, sharded: ShardedModel | None = None) -> None:
        self.model, self.topology = model, topology
        self._sharded = sharded
        self._single = ContextBuilder(model.config, 1, topology.device)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        *,
        stop_tokens: Collection[int] = (),
        vocab_size: int | None = None,
        batch_size: int = 16,
        on_token: OnToken | None = None,
    ) -> list[list[int]]:
        """The new tokens of each prompt, a stop token included.

        What is drawn for a prompt depends on the seed, its index and its tokens; not on the other prompts, the batch
        size or the layout (beyond rounding). Dropout is off.

        Args:
            prompts: token ids, of any lengths; up to ``batch_size`` of them go through the model together.
            stop_tokens: end a continuation.
            vocab_size: tokens from this id on are never chosen; None is the model's own.
            on_token: told of every token as it comes, and may end its prompt's continuation.

        Raises ConfigError for prompts that the model cannot continue, DivergenceError for logits that are not finite.
        """
        config = self.model.config
        check_prompts(config, prompts, max_new_tokens)
        vocab_size = min(vocab_size or config.vocab_size, config.vocab_size)
        request = _Request(max_new_tokens, sampling or Sampling(), stop_tokens, vocab_size, on_token)
        rows = [_Row(index, prompt) for index, prompt in enumerate(prompts)]
        with _generating(self.model):
            for first in range(0, len(rows), batch_size):
                self._continue(rows[first : first + batch_size], request)
        return [row.new for row in rows]

    def _continue(self, rows: list[_Row], request: _Request) -> None:
        cache = KeyValueCache(max(row.length for row in rows) + request.max_new_tokens)
        logits_BV = self._read_prompts(rows, cache)
        while True:
            unfinished = self._append(rows, self._next_tokens(rows, logits_BV, request), request)
            if not unfinished:
                return
            if len(unfinished) < len(rows):
                cache.keep(torch.tensor(unfinished, device=self.topology.device))
                rows = [rows[i] for i in unfinished]
            logits_BV = self._read_last_token(rows, cache)

    def _append(self, rows: list[_Row], tokens: list[int], request: _Request) -> list[int]:
        """Which rows go on after these tokens."""
        unfinished = []
        for i, (row, token) in enumerate(zip(rows, tokens)):
            if token < 0:
                raise DivergenceError(
                    f"prompt {row.index + 1}: the logits after {row.length} tokens are not finite: either the weights "
                    "are not, or the precision's range is too small for the activations (fp16; try bf16 or fp32)"
                )
            row.new.append(token)
            ended = token in request.stop_tokens or len(row.new) == request.max_new_tokens
            if request.on_token is not None:
                ended = request.on_token(row.index, token, ended) or ended
            if not ended:
                unfinished.append(i)
        return unfinished

    def _read_prompts(self, rows: list[_Row], cache: KeyValueCache) -> torch.Tensor | None:
        """All prompts, the shorter ones padded at their end, where nothing of their own looks."""
        size = max(len(row.prompt) for row in rows)
        padded = [[*row.prompt, *[0] * (size - len(row.prompt))] for row in rows]
        context = ContextBuilder(self.model.config, size, self.topology.device)(len(rows))
        last = [len(row.prompt) - 1 for row in rows]
        return self._forward(padded, last, context, size, cache)

    def _read_last_token(self, rows: list[_Row], cache: KeyValueCache) -> torch.Tensor | None:
        positions = [row.length - 1 for row in rows]
        length = max(positions) + 1
        positions_B1 = torch.tensor(positions, device=self.topology.device)[:, None]
        context = self._single(len(rows), positions=positions_B1)._replace(mask=self._visible(positions_B1, length))
        return self._forward([[row.new[-1]] for row in rows], [0] * len(rows), context, length, cache)

    def _visible(self, positions_B1: torch.Tensor, length: int) -> torch.Tensor:
        """(B, 1, 1, length) bool: the slots of a row's cache that its token sees."""
        slots = torch.arange(length, device=positions_B1.device)
        visible = slots <= positions_B1
        if self.model.config.sliding_window is not None:
            visible &= slots > positions_B1 - self.model.config.sliding_window
        return visible[:, None, None]

    def _forward(
        self, tokens: list[list[int]], last: list[int], context: Context, length: int, cache: KeyValueCache
    ) -> torch.Tensor | None:
        """Tokens (B, S) through all stages → on the last one each row's logits at ``last``, see ``_logits``."""
        layout, stage = self.topology.layout, self.topology.coordinates["pp"]
        rows, size = len(tokens), len(tokens[0])
        cache.begin(context.positions.view(-1, size).expand(rows, size), length)
        context = context._replace(cache=cache)
        transfers = None
        if layout.pp > 1:
            shape, dtype = (rows * size, self.model.config.hidden_size), next(self.model.parameters()).dtype
            ranks = layout.along(self.topology.rank, "pp")
            transfers = Transfers(self.topology.group("pp"), ranks, shape, dtype, self.topology.device)
        if transfers is not None and stage > 0:
            (x,) = transfers.exchange([], [stage - 1])
        else:
            x = torch.tensor(tokens, device=self.topology.device).flatten()
        if self._sharded is not None:
            self._sharded.gather()
            self._sharded.begin_forward()
        x, logits_BV = self.model(x, context), None
        if self.model.head is not None:
            at = torch.tensor(last, device=x.device)
            logits_BV = self._logits(x.view(rows, size, -1)[torch.arange(rows, device=x.device), at])
        if self._sharded is not None:
            self._sharded.end_forward()
        if cache.layers != len(self.model.layers):
            raise ConfigError.single(
                "model.attention", f"{self.model.config.attention}: its `combine` must call the one it overrides"
            )
        if transfers is not None and stage < layout.pp - 1:
            transfers.exchange([(x, stage + 1)], [])
            transfers.drain()
        return logits_BV

    def _next_tokens(self, rows: list[_Row], logits_BV: torch.Tensor | None, request: _Request) -> list[int]:
        """Each row's next token, drawn by one rank of the last stage for all ranks."""
        layout, rank = self.topology.layout, self.topology.rank
        source = layout.rank(pp=layout.pp - 1, dp=0, tp=0)
        tokens_B = torch.empty(len(rows), dtype=torch.int64, device=self.topology.device)
        if rank == source:
            assert logits_BV is not None
            uniforms = [uniform(request.sampling.seed, row.index, row.length) for row in rows]
            tokens_B = choose(logits_BV[:, : request.vocab_size], request.sampling, uniforms)
        if layout.world_size > 1:
            dist.broadcast(tokens_B, source, group=self.topology.world.group)
        return tokens_B.tolist()

    def _logits(self, last_BH: torch.Tensor) -> torch.Tensor:
        """(B, H) → (B, V or more) float32: padding, if any, comes after the vocabulary."""
        logits_BV = self.model.head(last_BH).float()
        group = self.topology.group("tp")
        return logits_BV if group is None else comm.all_gather(logits_BV.t(), group).t()


@contextmanager
def _generating(model: GPT) -> Iterator[None]:
    """Evaluation mode; every tensor-parallel rank has all tokens; nothing is compiled for each new length.

    The model is as it was afterwards. Only attributes of its modules change: they are called as ever, so that hooks
    on them see every use of their parameters.
    """
    training = model.training
    cut = [(m, tp) for m in model.modules() if isinstance(tp := getattr(m, "tp", None), TensorParallel)]
    with ExitStack() as stack:
        stack.callback(model.train, training)
        model.eval()
        for module, tp in cut:
            stack.callback(setattr, module, "tp", tp)
            module.tp = dataclasses.replace(tp, sequence_parallel=False)
        if model.head is not None:
            # A tensor-parallel head gives the loss; here it is the logits of its own rows that are wanted.
            stack.callback(delattr, model.head, "forward")
            model.head.forward = functools.partial(_rows_times, model.head)
        if "torch._dynamo" in sys.modules:  # importing it takes seconds, and unless it is there nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _rows_times(head: nn.Module, x_BH: torch.Tensor) -> torch.Tensor:
    return F.linear(x_BH, head.weight)
