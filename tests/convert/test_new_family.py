"""A new family is one file: the one that docs/convert.md shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megazero.convert import HFWeights, export, import_checkpoint, open_weights
from megazero.convert.families import FAMILIES
from megazero.convert.verify import TOLERANCE, largest_difference

transformers = pytest.importorskip("transformers")

DOCS = Path(__file__).resolve().parents[2] / "docs" / "convert.md"
SIZES = dict(
    **dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, max_position_embeddings=64),
    **dict(num_attention_heads=4, num_key_value_heads=2, head_dim=12),
)


@pytest.fixture
def seed_oss(monkeypatch) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    module: dict[str, object] = {}
    exec(compile(source, "seed_oss.py", "exec"), module)
    monkeypatch.setitem(FAMILIES, "seed_oss", module["FAMILY"])


@pytest.mark.parametrize(
    "biases", [dict(attention_bias=True, attention_out_bias=False), dict(attention_bias=False, attention_out_bias=True)]
)
def test_the_family_of_the_docs_goes_there_and_back(seed_oss, biases, tmp_path):
    model = transformers.AutoModelForCausalLM.from_config(transformers.SeedOssConfig(**SIZES, **biases))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_pretrained(tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "ours")
    assert largest_difference(open_weights(tmp_path / "ours"), tmp_path / "hf") < TOLERANCE
    export(tmp_path / "ours", tmp_path / "again")
    first, second = HFWeights(tmp_path / "hf"), HFWeights(tmp_path / "again")
    assert second.family.model_type == "seed_oss" and first.config == second.config
    assert all(torch.equal(first.read(name), second.read(name)) for name in first.parameters)
    assert largest_difference(open_weights(tmp_path / "ours"), tmp_path / "again") < TOLERANCE
