"""What a user does wrongly with an engine, or to its model: an error that says what to do instead. One process."""

from __future__ import annotations

import copy
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import megazero
from megazero.errors import ConfigError, LaunchError, MegazeroError
from megazero.integrations.weights import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from megazero.launch.worker import run_script
from megazero.zero.homes import home_of
from tests.foreign.test_surface import Net, inputs, net, no_launcher, plain_steps, started, steps

__all__ = ["no_launcher"]  # a fixture of every test here

SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


class Agents(nn.Module):
    """Without a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic, self.scale = net(), net(1), nn.Parameter(torch.ones(()))


def in_one_place() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight.data = model[0].weight.data
    return model


def of_complex_numbers() -> Net:
    model = net()
    model.turns = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    return model


@torch.inference_mode()
def without_versions() -> Net:
    return net()


def frozen() -> Net:
    model = net()
    model.first.weight.requires_grad_(False)
    return model


# What initialize is given


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": nn.Sequential(nn.LazyLinear(3))}, "0.weight has no shape yet, .* run the model on one batch first"),
        ({"model": in_one_place()}, "0.weight and 1.weight are two parameters in one place"),
        ({"model": of_complex_numbers()}, "turns is torch.complex64, .* keep it as torch.view_as_real of it"),
        ({"model": without_versions()}, "first.weight was made under torch.inference_mode"),
        ({"model_parameters": net()}, "model_parameters: is a Net; give parameters"),
        ({"model_parameters": ["first.weight"]}, "model_parameters: group 0 holds a str"),
        ({"model_parameters": [{"param": []}]}, "group 0 has no params, only param"),
        ({"model_parameters": [{"params": []}, nn.Parameter(torch.ones(3))]}, "group 1 is no dict"),
    ],
)
def test_arguments_of_other_kinds(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        started(**arguments)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_without_a_forward(stage: int) -> None:
    """Its modules are called one by one."""
    engine, reference = started(Agents(), stage, more=SGD), Agents()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2):
        found, wanted = (m.actor(inputs(step)) + 2 * m.critic(inputs(step)) for m in (engine.module, reference))
        engine.backward(found)
        engine.step()
        optimizer.zero_grad()
        wanted.backward()
        optimizer.step()
        assert found.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_what_a_model_may_bring(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Gradients of its own, which are of no step here; a sparse buffer, which a file cannot hold."""
    model = net()
    model.register_buffer("graph", torch.eye(6).to_sparse())
    model(inputs(5)).backward()
    engine, reference = started(model, 2, more=SGD), net()
    assert "the model has gradients, which are forgotten" in capsys.readouterr().out
    plain = plain_steps(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    assert steps(engine) == pytest.approx(plain, rel=1e-6) and model.graph.is_sparse
    with pytest.raises(MegazeroError, match="buffer graph: .* register it with persistent=False"):
        engine.save_checkpoint(tmp_path)


@pytest.mark.parametrize("stages", [(1, 3), (3, 0)])
def test_a_model_that_is_in_an_engine(stages: tuple[int, int], capsys: pytest.CaptureFixture) -> None:
    """The engine before is destroyed, and the model goes on where it was."""
    model, reference = net(), net()
    engines = []
    for stage in stages:
        engines.append(started(model, stage, more=SGD))
        plain = plain_steps(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
        assert steps(engines[-1]) == pytest.approx(plain, rel=1e-6)
    assert "the model was in an engine, which is destroyed" in capsys.readouterr().out
    gone = engines[0]
    for call in (
        lambda: gone(inputs()),
        gone.step,
        lambda: gone.save_checkpoint("x"),
        lambda: gone.load_checkpoint("x"),
    ):
        with pytest.raises(MegazeroError, match="the engine was destroyed"):
            call()
    with pytest.raises(ConfigError, match="0.first.weight is in the engine of another model; make one model of both"):
        started(nn.Sequential(model, nn.Linear(1, 1)))
    with pytest.raises(ConfigError, match="is an engine; give the module in it"):
        started(engines[1])
    engines.clear()
    gone = None  # nobody keeps an engine
    assert steps(started(model, 2)) == pytest.approx(plain_steps(reference, torch.optim.AdamW(reference.parameters())))


# The order of calls


@pytest.mark.parametrize("stage", [1, 3])
def test_a_micro_step_without_a_backward(stage: int) -> None:
    engine = started(stage=stage, more={"gradient_accumulation_steps": 2})
    for _ in range(2):
        with pytest.raises(MegazeroError, match="step: no backward has been run since the last step"):
            engine.step()
        engine.backward(engine(inputs()))
        engine.step()
    assert (engine.global_steps, engine.micro_steps) == (1, 2)
    assert engine.was_step_applied() and engine.get_batch_info() == (8, 4, 2)
    assert engine.get_mom() == [(0.9, 0.999)] and not engine.dynamic_loss_scale()
    with pytest.raises(AttributeError, match="neither the engine nor Net has set_train_micro_batch_size"):
        engine.set_train_micro_batch_size(3)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("of the user's")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_backward_that_fails(stage: int) -> None:
    """Half of its gradients are there: they are used in no step."""
    engine, reference = started(stage=stage, more=SGD), net()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        engine(torch.ones(4, 7))
    engine.module.first.register_forward_hook(lambda module, args, output: Fails.apply(output) if fails else None)
    fails = True
    with pytest.raises(ValueError, match="of the user's"):
        engine.backward(engine(inputs()))
    fails = False
    for call in (engine.step, lambda: engine.backward(engine(inputs()))):
        with pytest.raises(MegazeroError, match=r"ended in an error.*call engine.zero_grad\(\)"):
            call()
    engine.zero_grad()
    plain = plain_steps(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    assert steps(engine) == pytest.approx(plain, rel=1e-6)


def test_a_loss_through_two_engines() -> None:
    """Where stage 3 has cut the second one's parameters, and its engine knows nothing of the backward."""
    first, second = (started(nn.Linear(6, 6), stage=3) for _ in range(2))
    with pytest.raises(MegazeroError, match="leads through the models of two engines, make one model of both"):
        first.backward(second(first(inputs())).mean())


def test_a_step_that_cannot_be_whole() -> None:
    engine = started(more={"gradient_accumulation_steps": 2})
    for call in (engine.train_batch, engine.eval_batch):
        with pytest.raises(MegazeroError, match="the iterator ended after 1 of 2 micro-batches"):
            call(iter([inputs()]))
    assert engine.micro_steps == 0
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    engine = started(model, optimizer=optimizer, lr_scheduler=scheduler)
    before = model.second.weight.clone()
    engine.backward(engine(inputs()))
    with pytest.raises(MegazeroError, match=r"ReduceLROnPlateau.step.*'metrics'; .* engine.step\(lr_kwargs="):
        engine.step()
    assert torch.equal(before, model.second.weight)
    for metric in (1.0, 2.0):
        engine.step(lr_kwargs={"metrics": metric})
        engine.backward(engine(inputs()))
    assert engine.get_lr() == [pytest.approx(0.01)]


# The model since initialize


def add(model: Net) -> None:
    model.more = nn.Linear(1, 1)


def replace(model: Net) -> None:
    model.second.weight = nn.Parameter(torch.ones(1, 8))


def freeze(model: Net) -> None:
    model.second.requires_grad_(False)


def add_group(model: Net) -> None:
    home_of(model.second.weight).engine().optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def train_more(model: Net) -> None:
    model.first.requires_grad_(True)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add, "more.weight was added to the model"),
        (replace, "second.weight was added to the model, or put in another's place"),
        (freeze, "second.weight was trained when initialize was called, and is not to be now"),
        (add_group, "the optimizer has a parameter group that it did not have"),
        (train_more, "first.weight was frozen when initialize was called, and is to be trained now"),
    ],
)
def test_parameters_that_are_others_since_initialize(
    change: Callable, message: str, stage: int, tmp_path: Path
) -> None:
    engine = started(frozen(), stage, more={"steps_per_print": 1})
    steps(engine, 1)
    change(engine.module)
    with pytest.raises(MegazeroError, match=f"{message}.*initialize again"):
        steps(engine, 1)
    if change in (add, replace):
        with pytest.raises(MegazeroError, match=message):
            engine.save_checkpoint(tmp_path)


class Clamps(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("layer", [Clamps(6, 6), nn.Sequential(nn.Embedding(5, 6, max_norm=0.5), nn.Linear(6, 6))])
def test_weights_that_a_forward_changes(layer: nn.Module) -> None:
    """In the copy that stage 3 lets go of; elsewhere they stay changed."""
    given = inputs() if isinstance(layer, Clamps) else torch.tensor([1, 2])
    before = copy.deepcopy(layer.state_dict())
    engine = started(layer, 1)
    engine.backward(engine(given).square().mean())
    engine.step()
    assert any(float((value - before[name]).abs().max()) > 0.01 for name, value in layer.state_dict().items())
    layer.load_state_dict(before)
    engine = started(layer, 3)
    with pytest.raises(MegazeroError, match="weight was changed in place while a module ran.*use stage 2"):
        engine(given)


def test_what_cannot_be_copied() -> None:
    engine = started()
    with pytest.raises(MegazeroError, match="an engine cannot be copied"):
        copy.deepcopy(engine)
    rank = copy.deepcopy({"local_rank": engine.local_rank})["local_rank"]
    assert rank == engine.local_rank == 0 and torch.ones(1).to(rank).device == engine.device


# Arguments of other functions


def test_parameters_by_other_means() -> None:
    for given, message in (
        (net(), r"not a Net: give its parameters\(\)"),
        (net().named_parameters(), r"not a tuple: give parameters\(\), without names"),
        (["first"], "not a str"),
    ):
        with pytest.raises(MegazeroError, match=message):
            megazero.zero.GatheredParameters(given)
    with pytest.raises(ConfigError, match="dtype: is 'bf16'; give a dtype of torch's"):
        megazero.zero.Init(dtype="bf16")
    with pytest.raises(MegazeroError, match="client_state is a list; give a dict"):
        started().save_checkpoint("x", client_state=[1])


@pytest.mark.parametrize(
    ("half", "message"),
    [
        ("bf16", r"an input is fp32: cast it, by x.to\(torch.bfloat16\) say; buffers keep their dtype, scale"),
        ("fp16", r"an input is fp32: cast it, by x.to\(torch.float16\) say, or set fp16.auto_cast"),
    ],
)
def test_inputs_in_another_dtype(half: str, message: str) -> None:
    with pytest.raises(MegazeroError, match=message):
        started(more={half: {"enabled": True}})(inputs())


def test_modules_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for command, message in ((["-m"], "give the module"), (["-m", "no.such"], "there is no module 'no.such'")):
        with pytest.raises(LaunchError, match=message):
            run_script(command)


# Weights of a checkpoint


def test_weights_of_a_checkpoint_without_what_was_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(frozen(), 2)
    steps(engine, 1)
    engine.save_checkpoint(tmp_path, "all")
    engine.save_checkpoint(tmp_path, "trained", exclude_frozen_parameters=True)
    wanted = engine.module.state_dict()
    wanted.pop("first.weight")
    script = [str(tmp_path / "zero_to_fp32.py"), str(tmp_path), str(tmp_path / "out"), "--exclude_frozen_parameters"]
    monkeypatch.setattr(sys, "argv", [*script, "--tag", "all", "-d"])
    runpy.run_path(script[0], run_name="__main__")
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "2", tag="trained", exclude_frozen_parameters=True)
    for found in (
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, "all", exclude_frozen_parameters=True),
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, "trained", exclude_frozen_parameters=True),
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(tmp_path / "2" / "model.safetensors"),
    ):
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert len(get_fp32_state_dict_from_zero_checkpoint(tmp_path, "all")) == 4
    with pytest.raises(MegazeroError, match="was saved without its 1 frozen parameters"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, "trained")
    other = net(5)
    other.second = nn.Linear(8, 2, bias=False)
    before = other.first.weight.clone()
    with pytest.raises(MegazeroError, match=r"holds second.weight in the shape \[1, 8\]"):
        load_state_dict_from_zero_checkpoint(other, tmp_path, "all")
    assert torch.equal(other.first.weight, before)
