"""Checkpoints that DeepSpeed wrote (make_deepspeed.py) come in: its logits, its next losses; what is wrong is named.

fixtures/deepspeed.tar.xz holds them; make_deepspeed.py makes them anew where deepspeed is installed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megazero.convert.deepspeed import DeepSpeedWeights, is_deepspeed
from megazero.convert.foreign import load_tensors
from megazero.errors import ConvertError
from megazero.sharding import Rectangle
from tests.convert.make_model import logits, losses_after, unpack

FLOAT32 = [f"{kind}-stage{stage}" for kind in ("gpt2", "llama") for stage in (1, 2, 3)]
THREE = ["gpt2-stage2-3ranks", "llama-stage3-3ranks"]
TAG = "global_step2"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("deepspeed", tmp_path_factory.mktemp("deepspeed") / "made")


def assert_same_logits(weights: Any, expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    found, wanted = logits(weights, expected["tokens"]), expected["logits"]
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("case", [*FLOAT32, *THREE])
def test_logits_and_next_losses_are_deepspeeds(made: Path, case: str, tmp_path: Path) -> None:
    assert is_deepspeed(made / case) and is_deepspeed(made / case / TAG)
    weights, expected = DeepSpeedWeights(made / case), load_file(made / case / "expected.safetensors")
    assert_same_logits(weights, expected)
    training, ranks = weights.training, expected["batches"].shape[1]
    assert training is not None and weights.notes == ()
    assert (training.step, training.consumed_samples, training.optimizer_steps) == (2, 2 * ranks, 2)
    losses = losses_after(training, expected["batches"], tmp_path / "run")
    assert losses == pytest.approx(expected["losses"].tolist(), rel=5e-6)


def test_masters_are_taken_and_without_them_the_16_bit_weights(made: Path, tmp_path: Path) -> None:
    folder = made / "llama-stage1-bf16"
    masters = DeepSpeedWeights(folder)
    assert masters.training is not None
    shutil.copytree(folder, tmp_path / "half")
    for path in (tmp_path / "half" / TAG).glob("*_optim_states.pt"):
        path.unlink()
    half = DeepSpeedWeights(tmp_path / "half")
    assert half.training is None and "no *_optim_states.pt" in half.notes[0]
    for name in masters.parameters:
        assert torch.equal(masters.read(name).bfloat16().float(), half.read(name)), name
    assert any(not torch.equal(masters.read(name), half.read(name)) for name in masters.parameters)
    # Its logits are those of bf16 arithmetic.
    assert_same_logits(half, load_file(folder / "expected.safetensors"), 2e-2)


@pytest.mark.parametrize("case", ["gpt2-stage2-3ranks", "llama-stage3-3ranks"])
def test_a_box_is_the_same_part_of_the_whole(made: Path, case: str) -> None:
    weights, generator = DeepSpeedWeights(made / case), torch.Generator().manual_seed(3)
    for name, shape in weights.parameters.items():
        whole = weights.read(name)
        assert whole.shape == shape and whole.dtype == torch.float32
        low = [int(torch.randint(0, size, (), generator=generator)) for size in shape]
        count = [int(torch.randint(1, s - lo + 1, (), generator=generator)) for lo, s in zip(low, shape, strict=True)]
        box = Rectangle(tuple(low), tuple(count))
        assert torch.equal(weights.read(name, box), whole[box.within(Rectangle((0,) * len(shape), shape))]), name
        whole.zero_()
        assert weights.read(name).any(), name


def test_a_wrapper_around_the_model(made: Path, tmp_path: Path) -> None:
    """Its attribute's name stands before every parameter."""
    for case in ("llama-stage1", "gpt2-stage1"):
        shutil.copytree(made / case, tmp_path / case)

        def wrap(state: dict[str, Any]) -> None:
            state["module"] = {f"inner.{name}": tensor for name, tensor in state["module"].items()}
            state["param_shapes"] = [{f"inner.{n}": s for n, s in group.items()} for group in state["param_shapes"]]
            state["shared_params"] = {f"inner.{a}": f"inner.{b}" for a, b in state["shared_params"].items()}

        rewrite(tmp_path / case / TAG / "mp_rank_00_model_states.pt", wrap)
        assert_same_logits(DeepSpeedWeights(tmp_path / case), load_file(made / case / "expected.safetensors"))


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Saves a model's file anew, with what is read of it."""
    state = load_tensors(path)
    kept = ("module", "param_shapes", "shared_params", "buffer_names", "global_steps", "global_samples")
    state = {name: state[name] for name in kept}
    change(state)
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


OPTIMIZER = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
DAMAGE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "empty pointer": ("llama-stage1", lambda p: (p / "latest").write_text(""), "latest: is empty"),
    "wrong pointer": ("llama-stage1", lambda p: (p / "latest").write_text("global_step7"), "no folder .*global_step7"),
    "lost rank": ("llama-stage1", lambda p: (p / TAG / OPTIMIZER).unlink(), f"{OPTIMIZER}: missing: 2 ranks"),
    "lost rank of 3": (
        "llama-stage3-3ranks",
        lambda p: (p / TAG / OPTIMIZER).unlink(),
        f"{OPTIMIZER}: missing: 3 ranks",
    ),
    "cut rank": ("gpt2-stage2", lambda p: truncate(p / TAG / OPTIMIZER), f"{OPTIMIZER}: damaged or cut short"),
    "cut model": (
        "gpt2-stage3",
        lambda p: truncate(p / TAG / "zero_pp_rank_0_mp_rank_00_model_states.pt"),
        "model_states.pt: damaged or cut short",
    ),
    "lost model": ("gpt2-stage2", lambda p: (p / TAG / "mp_rank_00_model_states.pt").unlink(), "no folder|mp_rank_00"),
    "rank too many": (
        "llama-stage1",
        lambda p: shutil.copy(p / TAG / OPTIMIZER, p / TAG / OPTIMIZER.replace("rank_1", "rank_2")),
        "rank_2_.*of another save",
    ),
    "no weights in stage 3": (
        "llama-stage3",
        lambda p: [path.unlink() for path in (p / TAG).glob("*optim_states.pt")],
        "stage 3 keeps the weights in them",
    ),
    "pipeline": (
        "llama-stage1",
        lambda p: (p / TAG / "layer_00-model_states.pt").touch(),
        "layer_00-model_states.pt: a pipeline module",
    ),
    "tensor parallel": (
        "llama-stage1",
        lambda p: (p / TAG / "mp_rank_01_model_states.pt").touch(),
        "mp_rank_01_model_states.pt: written by several model-parallel ranks",
    ),
    "other sizes": (
        "llama-stage1",
        lambda p: edit_config(p, intermediate_size=21),
        r"mlp\.gate_proj\.weight has shape \[20, 12\], \[21, 12\] follows",
    ),
    "more layers": (
        "llama-stage1",
        lambda p: edit_config(p, num_hidden_layers=3),
        "missing .*layers.2.input_layernorm",
    ),
    "fewer layers": ("llama-stage1", lambda p: edit_config(p, num_hidden_layers=1), "unexpected .*layers.1."),
    "no config": ("llama-stage1", lambda p: (p / "config.json").unlink(), r"give its Hugging Face config\.json"),
}


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(made: Path, tmp_path: Path, damage: str) -> None:
    case, change, message = DAMAGE[damage]
    shutil.copytree(made / case, tmp_path / "broken")
    change(tmp_path / "broken")
    with pytest.raises(ConvertError, match=message):
        DeepSpeedWeights(tmp_path / "broken")


def test_the_config_may_be_given_apart(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "llama-stage3", tmp_path / "run")
    shutil.move(tmp_path / "run" / "config.json", tmp_path / "other.json")
    weights = DeepSpeedWeights(tmp_path / "run" / TAG, tmp_path / "other.json")
    assert_same_logits(weights, load_file(made / "llama-stage3" / "expected.safetensors"))
    assert weights.end_of_text == json.loads((tmp_path / "other.json").read_text())["eos_token_id"]


def test_of_two_tags_the_latest_is_taken_or_one_must_be_named(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "llama-stage1", tmp_path / "run")
    shutil.copytree(tmp_path / "run" / TAG, tmp_path / "run" / "global_step1")
    assert DeepSpeedWeights(tmp_path / "run").folder.name == TAG
    (tmp_path / "run" / "latest").unlink()
    with pytest.raises(ConvertError, match="global_step1, global_step2; give the folder"):
        DeepSpeedWeights(tmp_path / "run")
    assert DeepSpeedWeights(tmp_path / "run" / "global_step1").folder.name == "global_step1"


def test_a_hugging_face_directory_with_deepspeeds_state_is_hugging_faces(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "llama-stage1", tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").touch()
    assert not is_deepspeed(tmp_path / "run")
    assert is_deepspeed(tmp_path / "run" / TAG)
