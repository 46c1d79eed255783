"""P2: a run that was stopped and resumed is the run that never stopped. Cases 9, 12, 39, 40 and 42."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megazero.checkpoint import newest
from megazero.convert.importer import import_checkpoint
from megazero.errors import CheckpointError
from tests.distributed import harness
from tests.distributed.harness import RankFailure
from tests.engine.tiny import (
    ROOT,
    assert_close,
    assert_weights_close,
    open_run,
    rank_files,
    run_script,
    run_script_until_killed,
    series,
    state,
    steps_in,
    tiny,
)

DROPOUT = {"model.dropout": 0.1, "model.attention_dropout": 0.2}
NUMBERS = ("loss", "grad_norm", "lr", "consumed_samples")


def places(directory: Path) -> dict[str, Path]:
    return {"checkpoint.dir": directory, "log.jsonl": directory.with_suffix(".jsonl")}


def call(ranks: Callable, world_size: int, function: Callable, *args: object) -> None:
    """``function`` on the pool; on one rank here, which is quicker."""
    if world_size == 1:
        function(*args)
    else:
        ranks(world_size, function, *args)


@pytest.mark.parametrize(
    "world_size, changes",
    [
        (1, DROPOUT),
        (4, {"parallel.tp": 2, "parallel.pp": 2, **DROPOUT}),
        (4, {"parallel.pp": 2, "zero.stage": 1, "train.recompute": "full", "parallel.schedule": "gpipe", **DROPOUT}),
    ],
    ids=["one process", "tp2 pp2", "pp2 dp2 zero1"],
)
def test_killed_and_resumed_is_bitwise_the_run_that_never_stopped(
    corpus: Path, tmp_path: Path, ranks: Callable, world_size: int, changes: dict
) -> None:
    """All ranks die of kill -9 after step 6; the last save was at 4. The order of samples is shuffled, over epochs."""
    changes = changes | {"checkpoint.save_interval": 4}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    call(ranks, world_size, run_script, tiny(corpus, changes | places(whole)))
    settings = tiny(corpus, changes | places(broken))
    with pytest.raises(RankFailure, match="SIGKILL"):
        ranks(world_size, run_script_until_killed, settings, 6)
    assert steps_in(broken) == [4]
    call(ranks, world_size, run_script, settings)
    assert series(broken.with_suffix(".jsonl"), *NUMBERS) == series(whole.with_suffix(".jsonl"), *NUMBERS)
    assert len(series(whole.with_suffix(".jsonl"), *NUMBERS)) == 8
    assert rank_files(broken) == rank_files(whole)


def test_the_loss_scale_goes_on(corpus: Path, tmp_path: Path) -> None:
    """fp16: steps with overflow before and after the stop, and the scale doubling two good steps after one."""
    changes = {
        "train.precision": "fp16",
        "train.initial_loss_scale": 2.0**22,
        "train.loss_scale_window": 3,
        "optimizer.schedule": "constant",
    }
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_script(tiny(corpus, changes | places(whole) | {"train.steps": 10}))
    resumed = tiny(corpus, changes | places(broken) | {"train.steps": 10})
    run_script(resumed | {"train.steps": 5}, resumed)
    names = (*NUMBERS[:1], *NUMBERS[2:], "loss_scale")
    assert series(broken.with_suffix(".jsonl"), *names) == series(whole.with_suffix(".jsonl"), *names)
    assert rank_files(broken) == rank_files(whole)
    scales = [scale for (scale,) in series(whole.with_suffix(".jsonl"), "loss_scale").values()]
    assert scales[0] == 2.0**21 and scales[4] < 2.0**21 and any(b == 2 * a for a, b in zip(scales[4:], scales[5:]))


@pytest.fixture(scope="module")
def cut(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of tp 2, pp 2, dp 2 with ZeRO 1, saved at steps 4 and 8."""
    directory = tmp_path_factory.mktemp("runs") / "cut"
    changes = {"parallel.tp": 2, "parallel.pp": 2, "zero.stage": 1, "checkpoint.save_interval": 4, **places(directory)}
    harness.run(8, run_script, tiny(corpus, changes))
    return directory


@pytest.mark.parametrize(
    "tp, pp, dp, stage", [(1, 1, 1, 0), (4, 1, 2, 1), (1, 3, 1, 0), (1, 3, 2, 1)], ids=lambda value: str(value)
)
def test_resumed_in_another_layout(
    corpus: Path, tmp_path: Path, ranks: Callable, cut: Path, tp: int, pp: int, dp: int, stage: int
) -> None:
    """Cases 12, 39 and 42: moments, samples and learning rate go on; the trajectory is the same to rounding."""
    here = tmp_path / "here"
    changes = {"parallel.tp": tp, "parallel.pp": pp, "zero.stage": stage, **places(here)}
    changes["checkpoint.resume"] = cut / "step_00000004"
    call(ranks, tp * pp * dp, run_script, tiny(corpus, changes))
    wanted = series(cut.with_suffix(".jsonl"), "loss", "grad_norm")
    assert_close(series(here.with_suffix(".jsonl"), "loss", "grad_norm"), {s: v for s, v in wanted.items() if s > 4})
    assert_weights_close(state(here), state(cut))
    exact = series(cut.with_suffix(".jsonl"), "lr", "consumed_samples")
    assert series(here.with_suffix(".jsonl"), "lr", "consumed_samples") == {s: v for s, v in exact.items() if s > 4}


@pytest.mark.parametrize("before, after", [(0, 1), (1, 0)])
def test_resumed_in_another_zero_stage(corpus: Path, tmp_path: Path, ranks: Callable, before: int, after: int) -> None:
    whole, here = tmp_path / "whole", tmp_path / "here"
    ranks(2, run_script, tiny(corpus, {"zero.stage": before, "checkpoint.save_interval": 4, **places(whole)}))
    changes = {"zero.stage": after, "checkpoint.resume": whole / "step_00000004", **places(here)}
    ranks(2, run_script, tiny(corpus, changes))
    wanted = series(whole.with_suffix(".jsonl"), "loss", "grad_norm")
    assert_close(series(here.with_suffix(".jsonl"), "loss", "grad_norm"), {s: v for s, v in wanted.items() if s > 4})
    assert_weights_close(state(here), state(whole))


def test_loading_twice_is_loading_once(corpus: Path, tmp_path: Path, cut: Path) -> None:
    """Each load is saved again at once: three generations, one state."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    loaded = tiny(corpus, {"train.steps": 4, "checkpoint.resume": cut / "step_00000004", "checkpoint.dir": once})
    run_script(loaded, loaded | {"checkpoint.resume": once, "checkpoint.dir": twice})
    assert steps_in(once) == steps_in(twice) == [4]
    assert rank_files(once) == rank_files(twice)
    original = state(cut / "step_00000004")
    for key, tensor in state(twice).items():
        assert torch.equal(tensor, original[key]), key


def test_no_stale_shard_is_read(corpus: Path, tmp_path: Path, cut: Path, capfd: pytest.CaptureFixture) -> None:
    """Case 40: resumed and saved on in the same directory with fewer ranks; leftovers of a dead save lie about."""
    directory = tmp_path / "run"
    shutil.copytree(cut / "step_00000004", directory / "step_00000004")
    shutil.copytree(cut / "step_00000008", directory / ".step_00000008.saving")
    (directory / ".step_00000008.saving" / "manifest.json").unlink()
    (directory / "step_00000006").mkdir()
    (directory / "step_00000006" / "manifest.json").touch()
    run_script(tiny(corpus, {"checkpoint.dir": directory}))
    assert "step_00000006/manifest.json: damaged" in capfd.readouterr().out
    assert sorted(file.name for file in (directory / "step_00000008").iterdir()) == [
        "manifest.json",
        "rank_00000.safetensors",
        "verified",
    ]
    assert not (directory / ".step_00000008.saving").exists()
    assert_weights_close(state(directory), state(cut))


def test_only_the_newest_are_kept(corpus: Path, tmp_path: Path) -> None:
    changes = {"train.steps": 5, "checkpoint.save_interval": 1, "checkpoint.keep": 2, "checkpoint.dir": tmp_path}
    run_script(tiny(corpus, changes))
    assert steps_in(tmp_path) == [4, 5]


def test_more_steps_are_asked_for(corpus: Path, tmp_path: Path) -> None:
    """Case 9: train.steps is raised after 90 % of an epoch, with fewer epochs than the longer run has."""
    whole, longer = tmp_path / "whole", tmp_path / "longer"
    run_script(tiny(corpus, {"train.steps": 12, "optimizer.schedule": "constant", **places(whole)}))
    changes = {"optimizer.schedule": "constant", **places(longer)}
    run_script(*(tiny(corpus, changes | {"train.steps": steps}) for steps in (4, 12)))
    assert series(longer.with_suffix(".jsonl"), *NUMBERS) == series(whole.with_suffix(".jsonl"), *NUMBERS)
    assert rank_files(longer) == rank_files(whole)


def test_the_checkpoint_directory_is_all_that_is_needed(corpus: Path, tmp_path: Path) -> None:
    """The weights that a run began with may be gone once it has saved."""
    first, run = tmp_path / "first", tmp_path / "run"
    run_script(tiny(corpus, {"train.steps": 1, "checkpoint.dir": first}))
    changes = {"train.steps": 2, "checkpoint.dir": run, "model.init_from": first}
    settings = {name: value for name, value in tiny(corpus, changes).items() if not is_architecture(name)}
    run_script(settings)
    shutil.rmtree(first)
    run_script(settings | {"train.steps": 4})
    assert newest(run).name == "step_00000004"


def test_weights_alone_are_no_run_to_resume(corpus: Path, tmp_path: Path) -> None:
    weights = import_checkpoint(ROOT / "tests" / "fixtures" / "oracle" / "gpt2-tied" / "hf_init", tmp_path / "weights")
    settings = tiny(corpus, {"model.init_from": weights, "checkpoint.resume": weights})
    settings = {name: value for name, value in settings.items() if not is_architecture(name)}
    with pytest.raises(CheckpointError, match=r"holds weights only; to start from it, give it as model\.init_from"):
        open_run(settings)


def is_architecture(name: str) -> bool:
    return name.startswith("model.") and name != "model.init_from"


def test_what_a_resume_should_know_is_said(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Once and plainly: another order of samples, and a newer checkpoint that is not whole."""
    settings = tiny(corpus, {"checkpoint.dir": tmp_path, "checkpoint.save_interval": 1, "train.steps": 2})
    run_script(settings)
    capfd.readouterr()
    next((tmp_path / "step_00000002").glob("rank_*")).unlink()
    run_script({**settings, "data.seed": 5, "data.seq_length": 8, "train.steps": 3})
    said = capfd.readouterr().out
    assert "resumed step 1 from" in said
    assert said.count("passing over a checkpoint that is not whole") == 1
    changed = "data.seq_length = 8 (was 16), data.seed = 5 (was 1234), train.steps = 3 (was 2)"
    assert f"settings changed since step 1: {changed}; the run goes on at sample 8 of another order\n" in said


def test_what_changes_the_training_is_said_once_with_both_values(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """And nothing of places, layout and logging, nor of what is spelled out and was meant before."""
    settings = tiny(corpus, {"checkpoint.dir": tmp_path / "run", "train.steps": 2})
    run_script(settings)
    capfd.readouterr()
    same = {"model.ffn_hidden_size": 128, "model.num_key_value_heads": 4, "optimizer.eps": 1e-8}
    elsewhere = {"train.micro_batch_size": 2, "log.interval": 2, "log.jsonl": tmp_path / "a.jsonl", "train.seed": 5}
    run_script(settings | same | elsewhere)
    assert "changed since" not in capfd.readouterr().out
    changes = {
        "model.activation": "relu",
        "model.dropout": 0.1,
        "optimizer.lr": 0.0100000001,
        "optimizer.schedule": "linear",
        "train.steps": 3,
        "train.global_batch_size": 4,
    }
    run_script(settings | changes)
    said = capfd.readouterr().out
    told = (
        "model.activation = 'relu' (was 'gelu_tanh'), model.dropout = 0.1 (was 0), "
        "optimizer.lr = 0.0100000001 (was 0.01), optimizer.schedule = 'linear' (was 'cosine'), "
        "train.steps = 3 (was 2), train.global_batch_size = 4 (was 8)"
    )
    assert said.count("changed since") == 1 and f"settings changed since step 2: {told}\n" in said
