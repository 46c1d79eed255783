"""Checkpoints of the engine: any stage and number of ranks into any other. Cases 32 and 39 to 43."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn

import megazero
from megazero.checkpoint import Checkpoint, open_checkpoint
from megazero.errors import CheckpointError, MegazeroError
from tests.foreign.models import Odd, build, config, whole_weights

ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}}
OPTIMIZERS = {
    "AdamW": ADAMW,
    "SGD": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
    "Lion": {"type": "Lion", "params": {"lr": 1e-3}},
    "Adagrad": {"type": "Adagrad", "params": {"lr": 1e-2}},
    "Adafactor": {"type": "Adafactor", "params": {"lr": 1e-2}},
}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 3e-3}}
ROWS = 12


class Kept(nn.Module):
    """Tied, frozen and odd parameters, and buffers of several dtypes: saved, not saved, changed by forward."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = Odd()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("phase", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("ramp", torch.linspace(0, 1, 5, dtype=torch.bfloat16))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
        return self.odd(tokens)


class Plain(nn.Module):
    """Without a random number or a frozen parameter; ``width`` makes another model of it."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def wide() -> nn.Module:
    return Plain(6)


def rows(step: int) -> torch.Tensor:
    return torch.randint(13, (ROWS, 9), generator=torch.Generator().manual_seed(step))


def world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def start(factory: Callable[[], nn.Module], settings: dict[str, Any], seed: int = 3) -> Any:
    engine, *_ = megazero.initialize(model=build(factory, seed), config=copy.deepcopy(settings))
    return engine


def train(engine: Any, until: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step up to ``until``. A step's samples are the same for any number of ranks."""
    rank, size = world()
    found = []
    accumulation = engine.gradient_accumulation_steps()
    while engine.global_steps < until:
        parts = rows(engine.global_steps).chunk(size * accumulation)
        total = torch.zeros(())
        for micro_step in range(accumulation):
            loss = engine(parts[rank * accumulation + micro_step])
            total += engine.backward(loss)
            engine.step()
        if size > 1:
            dist.all_reduce(total)
        found.append((float(total) / size, engine.get_global_grad_norm()))
    return found


def reference(
    factory: Callable[[], nn.Module], steps: int
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Plain torch in float64, one process, never stopped."""
    model = build(factory).double()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(rows(step))
        loss.backward()
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found.append((loss.item(), float(torch.nn.utils.clip_grad_norm_(trained, float("inf")))))
        optimizer.step()
    return found, {name: p.detach() for name, p in model.named_parameters()}


def stretch(root: Path, settings: dict[str, Any], until: int, factory: Callable[[], nn.Module] = Odd) -> tuple:
    """Go on from what is there, with other initial weights to begin with, and save."""
    engine = start(factory, settings, seed=3 if not root.exists() else 8)
    engine.load_checkpoint(root)
    found = train(engine, until)
    engine.save_checkpoint(root)
    return found, whole_weights(engine)


def saved(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Everything that an optimizer and a model have in common in a checkpoint, and rank 0's own state."""
    with open_checkpoint(path) as checkpoint:
        checkpoint.verify()
        found = {
            (kind, name): checkpoint.read(kind, name)
            for kind in checkpoint.kinds
            for name in checkpoint.parameters
            if checkpoint.has(kind, name)
        }
        own = checkpoint.rank_state(0)
    return found | {("own", name): value for name, value in own.items() if not name.startswith("rng")}


def assert_same(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key


@pytest.mark.parametrize("path", [((4, 1), (2, 3), (3, 0)), ((2, 2), (3, 3), (1, 1))], ids=str)
def test_other_ranks_and_stages_go_on_as_one_run(tmp_path: Path, ranks: Callable, path: tuple) -> None:
    """Case 39, against plain torch that never stopped."""
    wanted, weights = reference(Odd, 6)
    found, last = [], {}
    for index, (size, stage) in enumerate(path):
        settings = config(stage, 1, 0.0, optimizer=ADAMW)
        results = ranks(size, stretch, tmp_path / "run", settings, 2 * (index + 1))
        assert all(result[0] == results[0][0] for result in results)
        found += results[0][0]
        last = results[0][1]
    assert len(found) == 6
    for (loss, norm), (loss_, norm_) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(loss_, rel=2e-6) and norm == pytest.approx(norm_, rel=5e-5)
    for name, value in weights.items():
        assert (last[name].double() - value).norm() <= 1e-4 * value.norm(), name


def steps_saved(root: Path, settings: dict[str, Any]) -> None:
    engine = start(Odd, settings)
    train(engine, 2)
    engine.save_checkpoint(root, "first")


def loaded_and_saved(root: Path, settings: dict[str, Any], times: int) -> None:
    engine = start(Odd, settings, seed=8)
    for _ in range(times):
        engine.load_checkpoint(root, "first")
    engine.save_checkpoint(root, "second")


@pytest.mark.parametrize("name", ["SGD", "Lion", "Adagrad", "Adafactor"])
def test_every_optimizers_state_moves(tmp_path: Path, ranks: Callable, name: str) -> None:
    """Cases 39 and 42: what one layout saved another gives back bit for bit, loaded once or twice."""
    before, after = (0, 0) if name == "Adafactor" else (2, 3)
    ranks(2, steps_saved, tmp_path, config(before, 1, 0.0, optimizer=OPTIMIZERS[name]))
    original = saved(tmp_path / "first")
    assert len({kind for kind, _ in original} - {"weight", "own"}) == 1 or name == "Adafactor"
    ranks(3, loaded_and_saved, tmp_path, config(after, 1, 0.0, optimizer=OPTIMIZERS[name]), 1 + (name == "Lion"))
    assert_same(saved(tmp_path / "second"), original)
    metas = [Checkpoint(tmp_path / tag).meta for tag in ("first", "second")]
    assert metas[0]["optimizer"] == metas[1]["optimizer"]


@pytest.mark.parametrize(
    "name, stage", [("Adafactor", 0), *((name, stage) for name in list(OPTIMIZERS)[:4] for stage in (0, 2, 3))]
)
def test_stopped_and_resumed_is_the_run_that_never_stopped(tmp_path: Path, name: str, stage: int) -> None:
    """Case 42, bit for bit, with accumulation, a schedule and clipping; random numbers go on too."""
    settings = config(stage, 2, 0.5, optimizer=OPTIMIZERS[name], scheduler=WARMUP)
    engine = start(Kept, settings)
    train(engine, 3)
    engine.save_checkpoint(tmp_path, client_state={"epoch": 3, "best": [0.5, None], "name": "x"})
    noise = torch.rand(3)
    wanted, weights = train(engine, 6), whole_weights(engine)
    other = start(Kept, settings, seed=8)
    where, client_state = other.load_checkpoint(tmp_path)
    assert where == str(tmp_path / "global_step3")
    assert client_state == {"epoch": 3, "best": [0.5, None], "name": "x"}
    assert (other.global_steps, other.micro_steps, other.global_samples) == (3, 6, 12)
    assert torch.equal(torch.rand(3), noise)
    assert other.get_lr() == start_rate(3)
    assert train(other, 6) == wanted
    assert_same(whole_weights(other), weights)
    assert_same(dict(other.module.named_buffers()), dict(engine.module.named_buffers()))


def start_rate(step: int) -> list[float]:
    """WARMUP's rate after so many steps, by its formula in DeepSpeed."""
    return [pytest.approx(3e-3 * math.log(step) / math.log(6))]


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    half = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}
    settings = config(1, 1, 0.0, optimizer=ADAMW, fp16=half)
    whole, broken = start(Odd, settings), start(Odd, settings)
    train(broken, 4)
    broken.save_checkpoint(tmp_path)
    resumed = start(Odd, settings, seed=8)
    resumed.load_checkpoint(tmp_path)
    assert resumed.loss_scale == broken.loss_scale and resumed.skipped_steps == broken.skipped_steps > 0
    train(whole, 9)
    train(resumed, 9)
    assert resumed.loss_scale == whole.loss_scale != broken.loss_scale
    assert_same(whole_weights(resumed), whole_weights(whole))


def frozen_and_tied(root: Path, stage: int, dtype: str) -> None:
    sections = {dtype: {"enabled": True}} if dtype else {}
    engine = start(Kept, config(stage, 1, 0.0, optimizer=ADAMW, **sections))
    train(engine, 1)
    engine.save_checkpoint(root, exclude_frozen_parameters=False)
    engine.save_checkpoint(root, "adapters", exclude_frozen_parameters=True)
    before = whole_weights(engine)
    other = start(Kept, config(stage, 1, 0.0, optimizer=ADAMW, **sections), seed=8)
    apart = whole_weights(other)
    other.load_checkpoint(root, "adapters")
    after = whole_weights(other)
    frozen = ["odd.frozen.weight", "odd.frozen.bias"]
    assert_same(after, {name: apart[name] if name in frozen else value for name, value in before.items()})
    other.load_checkpoint(root, "global_step1")
    assert_same(whole_weights(other), before)
    assert other.module.odd.head.weight is other.module.odd.embed.weight
    assert int(other.module.count) == 1


@pytest.mark.parametrize("stage, dtype", [(3, "bf16"), (1, "")])
def test_frozen_tied_and_buffers(tmp_path: Path, ranks: Callable, stage: int, dtype: str) -> None:
    """Cases 32 and 43."""
    ranks(2, frozen_and_tied, tmp_path, stage, dtype)
    whole, adapters = Checkpoint(tmp_path / "global_step1"), Checkpoint(tmp_path / "adapters")
    assert set(whole.parameters) - set(adapters.parameters) == {"odd.frozen.weight", "odd.frozen.bias"}
    model = Kept()
    assert set(whole.parameters) == {name for name, _ in model.named_parameters()}
    assert whole.meta["tied"] == {"odd.head.weight": "odd.embed.weight"}
    assert not whole.has("exp_avg", "odd.frozen.weight") and whole.has("exp_avg", "odd.unused.weight")
    own = whole.rank_state(0)
    names = {key.removeprefix("buffer/") for key in own if key.startswith("buffer/")}
    assert names == {"odd.inverse", "count", "phase", "ramp"}
    for name in names - {"count"}:
        assert_same({0: own[f"buffer/{name}"]}, {0: model.get_buffer(name)})
    assert whole.state_shapes(1).keys() == {"rng_cpu"}


def test_the_pointer_file_may_be_lost(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Case 40."""
    engine = start(Plain, config(1, 1, 0.0, optimizer=ADAMW))
    for step in (1, 2, 3):
        train(engine, step)
        engine.save_checkpoint(tmp_path, save_latest=step < 3)
    weights = {step: saved(tmp_path / f"global_step{step}") for step in (1, 2, 3)}
    latest = tmp_path / "latest"
    assert latest.read_text() == "global_step2"

    def found() -> str:
        capsys.readouterr()
        where, _ = engine.load_checkpoint(tmp_path)
        engine.save_checkpoint(tmp_path / "again", "x")
        name = Path(where).name.removesuffix(".replaced")
        assert_same(saved(tmp_path / "again" / "x"), weights[int(name[-1])])
        return name

    assert found() == "global_step2"
    for content in (None, b"", b"nonsense", b"../global_step1", b"\xff\xfe"):
        latest.unlink()
        if content is not None:
            latest.write_bytes(content)
        assert found() == "global_step3"
        assert "using" in capsys.readouterr().out or content is None
        latest.touch()
    next((tmp_path / "global_step3").glob("rank*")).unlink()
    assert found() == "global_step2"
    latest.write_text("global_step3")
    assert found() == "global_step2"
    os.rename(tmp_path / "global_step1", tmp_path / "global_step1.replaced")
    latest.write_text("global_step1")
    assert found() == "global_step1"  # a save of this tag was cut off between two renames


def test_the_same_tag_by_fewer_ranks(tmp_path: Path, ranks: Callable) -> None:
    """Case 40: no file of the former save is left to be read."""
    settings = config(1, 1, 0.0, optimizer=ADAMW)
    ranks(3, steps_saved, tmp_path, settings)
    steps_saved(tmp_path, settings)
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == ["manifest.json", "rank_00000.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "first", "latest", "zero_to_fp32.py"]


def test_nothing_is_loaded_in_part(tmp_path: Path) -> None:
    """Each way a checkpoint can be wrong is one error that says what and how to go on."""
    settings = config(3, 1, 0.0, optimizer=ADAMW, scheduler=WARMUP)
    engine = start(Plain, settings)
    train(engine, 2)
    engine.save_checkpoint(tmp_path, "good")
    engine.save_checkpoint(tmp_path, "damaged")
    file = next((tmp_path / "damaged").glob("rank*"))
    data = bytearray(file.read_bytes())
    data[-40] ^= 1
    file.write_bytes(data)
    sgd = OPTIMIZERS["SGD"]
    for factory, changes, tag, told in (
        (wide, {}, "good", [r"another shape embed.weight \[13, 5\], not \[13, 6\]", "Give the model"]),
        (Odd, {}, "good", ["lacks ", "buffer inverse", "has in excess head.bias", "Give the model"]),
        (Plain, {"optimizer": sgd}, "good", ["state of AdamW, and this run uses SGD", "load_optimizer_states=False"]),
        (Plain, {"scheduler": None}, "good", ["state of WarmupLR, and this run uses none", "load_lr_scheduler_"]),
        (wide, {"scheduler": None}, "good", [r"not \[13, 6\]", "this run uses none"]),
        (Plain, {}, "damaged", ["rank_00000.safetensors: damaged", "Restore the file"]),
        (Plain, {}, "none", ["no such checkpoint; there are damaged, good"]),
        (Plain, {}, "../good", ["must be a plain name"]),
    ):
        here = {key: value for key, value in {**settings, **changes}.items() if value is not None}
        other = start(factory, here, seed=8)
        train(other, 1)
        other.save_checkpoint(tmp_path / "before", "x")
        for text in told:
            with pytest.raises(CheckpointError, match=text):
                other.load_checkpoint(tmp_path, tag)
        other.save_checkpoint(tmp_path / "before", "y")
        assert_same(saved(tmp_path / "before" / "y"), saved(tmp_path / "before" / "x"))
        assert other.global_steps == 1
    other = start(Plain, {**settings, "optimizer": sgd}, seed=8)
    other.load_checkpoint(tmp_path, "good", load_optimizer_states=False)
    assert_same(whole_weights(other), whole_weights(engine))
    assert other.global_steps == 2 and other.get_lr() == engine.get_lr()


def test_a_part_of_a_checkpoint_on_purpose(tmp_path: Path) -> None:
    engine = start(Plain, config(1, 1, 0.0, optimizer=ADAMW))
    train(engine, 2)
    engine.save_checkpoint(tmp_path)
    only = start(Plain, config(3, 1, 0.0, optimizer=OPTIMIZERS["SGD"]), seed=8)
    only.load_checkpoint(tmp_path, load_module_only=True)
    assert_same(whole_weights(only), whole_weights(engine))
    assert only.global_steps == 0

    class Longer(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.layers.append(nn.Linear(5, 5))

    longer = start(Longer, config(3, 1, 0.0, optimizer=ADAMW), seed=8)
    own = whole_weights(longer)
    longer.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=False)
    wanted = own | whole_weights(engine)
    assert_same(whole_weights(longer), wanted)


def test_client_state_is_json(tmp_path: Path) -> None:
    engine = start(Plain, config(0, 1, 0.0, optimizer=ADAMW))
    for value, key in (
        ({"a": {"b": [0, torch.zeros(2)]}}, r"client_state\['a'\]\['b'\]\[1\] is a Tensor"),
        ({"a": (1, 2)}, r"client_state\['a'\] is a tuple"),
        ({"a": {1: 2}}, r"client_state\['a'\] is a dict with keys"),
        ({"a": object()}, r"client_state\['a'\] is a object"),
    ):
        with pytest.raises(CheckpointError, match=key):
            engine.save_checkpoint(tmp_path, client_state=value)
    with pytest.raises(CheckpointError, match="name that checkpoints use themselves"):
        engine.save_checkpoint(tmp_path, "latest")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file: is a file; save_dir must be a directory"):
        engine.save_checkpoint(tmp_path / "file")
    assert engine.load_checkpoint(tmp_path / "nowhere") == engine.load_checkpoint(tmp_path) == (None, {})


def test_saved_between_boundaries(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The step under way starts anew, also with another number of accumulation steps; and a load forgets gradients."""
    engine = start(Plain, config(2, 2, 0.0, optimizer=ADAMW))
    train(engine, 1)
    engine.backward(engine(rows(1)[:6]))
    engine.step()
    engine.save_checkpoint(tmp_path)
    assert "between accumulation boundaries" in capsys.readouterr().out
    wanted = None
    for accumulation in (2, 3):
        other = start(Plain, config(2, accumulation, 0.0, optimizer=ADAMW), seed=8)
        other.backward(other(rows(7)[:6]))
        other.load_checkpoint(tmp_path)
        assert (other.global_steps, other.micro_steps) == (1, accumulation)
        ((loss, norm),) = train(other, 2)
        wanted = wanted or (loss, norm)
        assert loss == pytest.approx(wanted[0], rel=2e-6) and norm == pytest.approx(wanted[1], rel=5e-5)


def mics(root: Path) -> None:
    engine = start(Odd, config(3, 1, 0.0, optimizer=ADAMW, zero_optimization={"mics_shard_size": 2}))
    train(engine, 2)
    engine.save_checkpoint(root)
    expected = whole_weights(engine)
    engine.load_checkpoint(root)
    assert_same(whole_weights(engine), expected)


def test_one_copy_of_replicated_state_is_saved(tmp_path: Path, ranks: Callable) -> None:
    ranks(4, mics, tmp_path)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "global_step2").glob("rank*"))]
    assert max(sizes[2:]) < min(sizes[:2])
    other = start(Odd, config(0, 1, 0.0, optimizer=ADAMW), seed=8)
    other.load_checkpoint(tmp_path)
    wanted, weights = reference(Odd, 2)
    for name, value in whole_weights(other).items():
        assert (value.double() - weights[name]).norm() <= 1e-4 * weights[name].norm(), name


def tags_differ(root: Path, validation: str) -> str:
    settings = config(0, 1, 0.0, optimizer=ADAMW, checkpoint={"tag_validation": validation})
    engine = start(Plain, settings)
    try:
        engine.save_checkpoint(root, f"of_rank_{world()[0]}")
    except CheckpointError as error:
        return str(error)
    return ""


def test_ranks_that_give_different_tags(tmp_path: Path, ranks: Callable) -> None:
    assert ranks(2, tags_differ, tmp_path, "Warn") == ["", ""]
    assert [path.name for path in tmp_path.glob("of_rank*")] == ["of_rank_0"]
    assert all("different tags: of_rank_0, of_rank_1" in text for text in ranks(2, tags_differ, tmp_path, "Fail"))


def test_a_model_in_parts_of_its_own_is_refused(tmp_path: Path) -> None:
    engine = start(Plain, config(0, 1, 0.0, optimizer=ADAMW))
    layout = type(engine.topology.layout)(tp=2)
    engine.topology.layout = layout
    with pytest.raises(MegazeroError, match="with tp 2 and pp 1 in the topology"):
        engine.save_checkpoint(tmp_path)
