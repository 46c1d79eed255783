"""P1 beyond the reference runs: other families and odd sizes, each layout against a plain float64 loop of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megazero.models.config import ModelConfig
from megazero.models.init import draw
from tests.distributed.runs import (
    Layout,
    TokenSource,
    assert_close,
    plain_loop,
    random_weights,
    settings,
    train,
)

GPT2 = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 37,
    "max_position_embeddings": 24,
}
LLAMA = {
    **GPT2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "ffn_hidden_size": 24,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position": "rotary",
    "qkv_bias": False,
    "out_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
ONE_KV_HEAD = {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 1}
QWEN2 = {**LLAMA, "qkv_bias": True, "tie_word_embeddings": True, "rope_theta": 1e6}
QWEN3 = {**LLAMA, "num_attention_heads": 4, "head_dim": 6, "qk_norm": True}
MISTRAL = {**LLAMA, "sliding_window": 5}


def check(model: dict[str, Any], layout: Layout, source: TokenSource | None = None, **sections: Any) -> None:
    """A few steps under ``layout`` against the plain loop."""
    tree = settings(model, layout, **sections)
    source = source or TokenSource(model["vocab_size"], tree["data"]["seq_length"])
    weights = random_weights(ModelConfig(**model))
    assert_close(train(tree, source, weights, dp=layout[2]), plain_loop(tree, source, weights))


@pytest.mark.parametrize(
    ("model", "layout", "sequence"),
    [
        pytest.param(GPT2, (1, 1, 1), False, id="gpt2-tp1-pp1-dp1"),
        pytest.param(GPT2, (4, 1, 1), True, id="gpt2-tp4-pp1-dp1-sequence"),
        pytest.param(GPT2, (2, 2, 2), False, id="gpt2-tp2-pp2-dp2"),
        pytest.param({**GPT2, "tie_word_embeddings": False}, (2, 2, 1), True, id="gpt2_untied-tp2-pp2-dp1-sequence"),
        pytest.param(LLAMA, (1, 2, 2), False, id="llama_gqa-tp1-pp2-dp2"),
        pytest.param(LLAMA, (8, 1, 1), True, id="llama_gqa-tp8-pp1-dp1-sequence"),
        pytest.param({**LLAMA, "tie_word_embeddings": True}, (4, 2, 1), False, id="llama_tied-tp4-pp2-dp1"),
        pytest.param(ONE_KV_HEAD, (2, 1, 2), True, id="one_kv_head-tp2-pp1-dp2-sequence"),
        pytest.param(QWEN2, (4, 2, 1), True, id="qwen2-tp4-pp2-dp1-sequence"),
        pytest.param(QWEN3, (2, 1, 2), False, id="qwen3-tp2-pp1-dp2"),
        pytest.param(QWEN3, (4, 1, 1), True, id="qwen3-tp4-pp1-dp1-sequence"),
        pytest.param(MISTRAL, (2, 2, 1), True, id="mistral-tp2-pp2-dp1-sequence"),
    ],
)
def test_a_family_under_a_layout(model: dict[str, Any], layout: Layout, sequence: bool) -> None:
    check(
        model,
        layout,
        parallel={"sequence_parallel": sequence, "schedule": "1f1b" if sequence else "gpipe"},
        zero={"stage": 1 if sequence else 0, "allgather_bucket_size": 2000, "reduce_bucket_size": 3000},
        data={"seq_length": 16},
        train={"micro_batch_size": 2},
    )


@pytest.mark.parametrize(
    ("vocab_size", "layout", "multiple", "tied"),
    [
        (157, (4, 1, 1), 1, False),  # 40 rows each, the last rank 37
        (157, (2, 2, 1), 128, True),  # the second rank has 29 rows of 128
        (5, (4, 1, 1), 1, True),  # 2 rows each: one row on the third rank, none on the fourth
        (5, (4, 1, 1), 1, False),
        (3, (4, 1, 1), 4, True),  # all on the first rank
    ],
)
def test_a_vocabulary_that_does_not_divide(vocab_size: int, layout: Layout, multiple: int, tied: bool) -> None:
    model = {**GPT2, "vocab_size": vocab_size, "tie_word_embeddings": tied}
    check(model, layout, parallel={"vocab_multiple": multiple}, zero={"stage": 1})


@pytest.mark.parametrize(
    ("layers", "pp", "partition"),
    [(5, 2, None), (5, 3, None), (5, 4, None), (7, 2, None), (5, 3, (3, 1, 1)), (7, 4, (1, 4, 1, 1))],
)
def test_layers_that_do_not_divide_by_stages(layers: int, pp: int, partition: tuple[int, ...] | None) -> None:
    check({**GPT2, "num_layers": layers}, (1, pp, 1), parallel={"partition": partition}, zero={"stage": 1})


def test_a_sequence_that_tp_does_not_divide() -> None:
    """Sequence parallelism then turns itself off."""
    check(LLAMA, (4, 1, 1), data={"seq_length": 13})


class DocumentSource(TokenSource):
    """Samples that cross documents: token 0 ends one; positions restart there, and it is out of the loss."""

    def __init__(self, vocab_size: int, seq_length: int) -> None:
        super().__init__(vocab_size, seq_length)
        inputs = self.fields["tokens"][:, :-1]
        inputs[torch.rand(inputs.shape, generator=torch.Generator().manual_seed(1)) < 0.2] = 0
        starts = torch.zeros_like(inputs, dtype=torch.bool)
        starts[:, 1:] = inputs[:, :-1] == 0
        order = torch.arange(seq_length).expand_as(inputs)
        self.fields["documents"] = starts.cumsum(1)
        self.fields["positions"] = order - torch.where(starts, order, 0).cummax(1).values
        self.fields["weights"] = (inputs != 0).float()


@pytest.mark.parametrize("model", [GPT2, LLAMA, MISTRAL], ids=["learned", "rotary", "window"])
@pytest.mark.parametrize("layout", [(2, 2, 1), (1, 2, 2)], ids=str)
def test_documents_kept_apart(model: dict[str, Any], layout: Layout) -> None:
    check(model, layout, DocumentSource(37, 12), zero={"stage": 1}, train={"micro_batch_size": 2})


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2)], ids=str)
def test_dropout_masks_belong_to_tokens(layout: Layout) -> None:
    """The plain loop's masks, wherever a token lies."""
    check({**GPT2, "dropout": 0.3, "attention_dropout": 0.0}, layout, zero={"stage": 1})


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [((1, 1, 1), "selective"), ((1, 1, 1), "full"), ((2, 1, 1), "selective"), ((2, 2, 1), "full")],
)
def test_recompute_changes_no_bit(layout: Layout, recompute: str) -> None:
    """Dropout on, that of the attention weights too: the masks are drawn again as they were."""
    model = {**GPT2, "dropout": 0.2, "attention_dropout": 0.4}
    source, weights = TokenSource(37, 12), random_weights(ModelConfig(**model))
    kept, again = (
        train(settings(model, layout, train={"recompute": choice}), source, weights) for choice in ("none", recompute)
    )
    assert again.losses == kept.losses and again.norms == kept.norms
    assert all(torch.equal(again.weights[name], kept.weights[name]) for name in kept.weights)


@pytest.mark.parametrize("model", [GPT2, QWEN3], ids=["gpt2", "qwen3"])
def test_initial_weights_are_the_same_bits_under_every_layout(model: dict[str, Any]) -> None:
    config = ModelConfig(**model)
    for layout in [(1, 1, 1), (4, 1, 1), (2, 2, 2), (1, 2, 4)]:
        tree = settings(model, layout, zero={"stage": layout[2] % 2}, train={"seed": 7})
        found = train(tree, TokenSource(37, 12), dp=layout[2], steps=0).weights
        assert found.keys() == random_weights(config).keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, draw(config, name, tuple(tensor.shape), 7, "cpu")), (layout, name)
            expected = 1.0 if name.endswith("norm.weight") else 0.0
            std = 0.0 if tensor.dim() == 1 else 0.02 / (2 if name.endswith(("out.weight", "down.weight")) else 1)
            assert abs(tensor.mean() - expected) < 6 * std / tensor.numel() ** 0.5 + 1e-9, name
            assert abs(tensor.std() - std) < 6 * std / tensor.numel() ** 0.5 + 1e-9, name
