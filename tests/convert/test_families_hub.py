"""Every family and version in its hub-shaped directory, judged by transformers: logits, and the way there and back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import distributed as dist

from megazero.config import Config
from megazero.convert import HFWeights, export, import_checkpoint, open_weights
from megazero.convert.verify import TOLERANCE, largest_difference
from megazero.engine import Engine
from megazero.restore import resolve_model
from tests.convert import hub
from tests.distributed import runs

TOKENS_BS = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, tuple[Path, dict[str, torch.Tensor]]]:
    """Name → directory, and its parameters under transformers' names."""
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("hub")
    return {name: (root / name, hub.write(name, root / name)) for name in hub.VERSIONS}


@pytest.mark.parametrize("name", hub.VERSIONS)
def test_import_and_export_change_no_bit(name, written, tmp_path):
    (source, before), version = written[name], hub.VERSIONS[name]
    import_checkpoint(source, tmp_path / "ours")
    assert largest_difference(open_weights(tmp_path / "ours"), source) < TOLERANCE
    export(tmp_path / "ours", tmp_path / "hf", dtype=str(version.dtype).removeprefix("torch."))
    after = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    assert after.keys() == before.keys()
    for key, value in after.items():
        assert value.dtype == version.dtype and torch.equal(value, before[key]), key
    original, again = HFWeights(source), HFWeights(tmp_path / "hf")
    assert again.config == original.config and again.family is original.family
    assert again.tokens == {"pad_token_id": None, **original.tokens}
    for file in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "hf" / file).read_bytes() == (source / file).read_bytes()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2", {"num_attention_heads": 2, "n_head": None, "num_hidden_layers": 2, "n_layer": None}),
        ("mistral-v0.1", {"head_dim": 8, "layer_types": ["full_attention"] * 2}),
        ("mistral-v0.1", {"head_dim": 8, "layer_types": ["sliding_attention"] * 2}),
    ],
    ids=["aliases", "types-full", "types-sliding"],
)
def test_fields_by_other_names(name, changes, written, tmp_path):
    """None: left out. That the head's number or the window was overlooked shows in no tensor's shape."""
    shutil.copytree(written[name][0], tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    assert largest_difference(HFWeights(tmp_path / "hf"), tmp_path / "hf") < TOLERANCE


def rank_logits(paths: list[str], tp: int, pp: int, trained: str = "") -> list[torch.Tensor]:
    """This rank's columns of each model's logits (B·S, local vocabulary); nothing where the head is on another.

    ``trained``: a folder for checkpoints of the models after two steps of training, to which the logits then belong.
    """
    found = []
    for number, path in enumerate(paths):
        tree = runs.settings(
            {"init_from": path},
            (tp, pp, 1),
            parallel={"sequence_parallel": False},
            data={"seq_length": 24},
            train={"steps": 2},
            checkpoint={"dir": f"{trained}/{number}" if trained else None},
        )
        config = resolve_model(Config.from_dict(tree), tp * pp)
        with runs.make_engine(config) as engine:
            if trained:
                source = runs.TokenSource(engine.model_config.vocab_size, 24)
                for _ in range(2):
                    engine.train_batch(source)
                engine.save(source)
            found += stage_logits(engine, dist.get_rank(), tp)
    return found


@torch.no_grad()
def stage_logits(engine: Engine, rank: int, tp: int) -> list[torch.Tensor]:
    stage = engine.stage
    stage.model.eval()
    runs.make_whole(stage.sharded)
    x = TOKENS_BS.flatten()
    if stage.model.embedding is None:
        x = torch.empty(TOKENS_BS.numel(), engine.model_config.hidden_size)
        dist.recv(x, rank - tp)
    x = stage.model(x, stage.contexts(len(TOKENS_BS)))
    if stage.model.head is None:
        dist.send(x, rank + tp)
        return []
    return [F.linear(x, stage.model.head.weight[: stage.model.head.valid])]


def assert_same_logits(parts: list[list[torch.Tensor]], directories: list[Path]) -> None:
    for index, directory in enumerate(directories):
        ours = torch.cat([part[index] for part in parts if part], dim=1).view(*TOKENS_BS.shape, -1)
        theirs = hub.logits(directory, TOKENS_BS)
        assert (ours - theirs).abs().max() < TOLERANCE * theirs.abs().max(), directory.name


@pytest.mark.parametrize(
    ("tp", "pp", "names"),
    [(2, 2, tuple(hub.VERSIONS)), (4, 1, ("gpt2", "llama-3.2", "qwen2"))],
    ids=["tp2-pp2", "tp4-pp1"],
)
def test_logits_of_every_layout(tp: int, pp: int, names: tuple[str, ...], written, ranks: Callable):
    directories = [written[name][0] for name in names]
    parts = ranks(tp * pp, rank_logits, [str(path) for path in directories], tp, pp, timeout=600)
    assert_same_logits(parts, directories)


def test_case_44_what_a_layout_has_trained_is_exported(written, ranks: Callable, tmp_path: Path):
    """Biases, grouped-query attention, tied and untied heads; 97 rows of a vocabulary that two ranks pad to 104."""
    names = ("gpt2", "llama-3.2", "qwen2", "qwen2.5-tied", "mistral-v0.3")
    parts = ranks(4, rank_logits, [str(written[name][0]) for name in names], 2, 2, str(tmp_path), timeout=600)
    exports = [export(tmp_path / str(number), tmp_path / name) for number, name in enumerate(names)]
    assert_same_logits(parts, exports)
    for name, directory in zip(names, exports, strict=True):
        words = HFWeights(directory).read("embedding.word.weight")
        before = HFWeights(written[name][0]).read("embedding.word.weight")
        assert len(words) == 97 and not torch.equal(words, before), name
