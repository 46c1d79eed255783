"""What a context does to the model: packed documents, sliding windows, positions."""

from __future__ import annotations

import pytest
import torch

from megazero.models import init
from megazero.models.config import ModelConfig
from megazero.models.context import ContextBuilder, build_context
from megazero.models.gpt import GPT

SIZES = dict(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=37, max_position_embeddings=32)
CONFIGS = {
    "learned": ModelConfig(**SIZES),
    "rotary": ModelConfig(**SIZES, num_key_value_heads=2, position="rotary", norm="rmsnorm", activation="swiglu"),
    "rotary-window": ModelConfig(**SIZES, position="rotary", sliding_window=3),
}


def model(config: ModelConfig) -> GPT:
    gpt = GPT(config)
    for name, parameter in gpt.named_parameters():
        parameter.data.copy_(init.draw(config, name, tuple(parameter.shape), 0, "cpu") * 10)
    return gpt.double()


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_equal_separate_passes(name: str) -> None:
    config = CONFIGS[name]
    gpt = model(config)
    # Rows of 12 tokens cut into documents of these lengths; the first row is one whole document.
    rows = [[12], [5, 1, 6], [1, 2, 9]]
    tokens = torch.randint(37, (3, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])
    documents = torch.stack(
        [torch.cat([torch.full((n,), 7 * i + d) for d, n in enumerate(lengths)]) for i, lengths in enumerate(rows)]
    )
    packed = gpt(tokens.flatten(), build_context(config, 12, 3, positions=positions, documents=documents))
    separate = []
    for row, lengths in zip(tokens, rows):
        for document in row.split(lengths):
            separate.append(gpt(document, build_context(config, len(document), 1)))
    torch.testing.assert_close(packed, torch.cat(separate), rtol=0, atol=1e-12)


def test_a_window_sees_exactly_its_tokens() -> None:
    config = ModelConfig(**{**SIZES, "num_layers": 1}, position="rotary", sliding_window=3)
    gpt = model(config)
    tokens = torch.randint(37, (10,), generator=torch.Generator().manual_seed(0))
    context = build_context(config, 10, 1)
    before = gpt(tokens, context)
    tokens[4] = (tokens[4] + 1) % 37
    changed = (gpt(tokens, context) != before).any(dim=-1)
    assert changed.nonzero().flatten().tolist() == [4, 5, 6]


def test_plain_attention_needs_no_mask() -> None:
    builder = ContextBuilder(CONFIGS["rotary"], 12, "cpu")
    assert builder(4).mask is None
    assert ContextBuilder(ModelConfig(**SIZES, sliding_window=12), 12, "cpu")(4).mask is None
    assert ContextBuilder(ModelConfig(**SIZES, sliding_window=11), 12, "cpu")(4).mask.sum() == 12 * 13 // 2 - 1


def test_keys_are_numbers_of_tokens_only_with_dropout() -> None:
    samples = torch.tensor([2**40, 3])
    assert build_context(ModelConfig(), 16, 2, samples=samples).dropout_key is None
    config = ModelConfig(dropout=0.1)
    assert build_context(config, 16, 2).dropout_key is None
    assert build_context(config, 16, 2, samples=samples).dropout_key.unique().numel() == 32
