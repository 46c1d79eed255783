"""What a user of the engine calls and leaves out: each outcome is decided, and said. One process, no launcher."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megazero
from megazero.errors import ConfigError, DivergenceError, MegazeroError
from megazero.foreign import reports

STAGES = (0, 1, 2, 3)


class Net(nn.Module):
    """Two layers and a buffer; returns the mean square of what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1, bias=False)
        self.register_buffer("scale", torch.tensor(1 / 3))
        self.nickname = "net"

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        found = self.second(torch.tanh(self.first(x))) * self.scale.to(x.dtype)
        return (found - (0 if y is None else y)).square().mean()


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def inputs(step: int = 0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def settings(stage: int = 0, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "zero_optimization": zero, **more}


def started(model: nn.Module | None = None, stage: int = 0, config: dict | None = None, **arguments: Any) -> Any:
    more = arguments.pop("more", {})
    given = settings(stage, **more) if config is None else config
    return megazero.initialize(model=net() if model is None else model, config=given, **arguments)[0]


def steps(engine: Any, count: int = 3, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + count):
        loss = engine(inputs(step).to(engine.local_rank))
        losses.append(float(engine.backward(loss)))
        engine.step()
    return losses


def plain_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3, scheduler: Any = None
) -> list[float]:
    losses = []
    for step in range(count):
        loss = model(inputs(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss))
    return losses


def weights(engine: Any) -> list[torch.Tensor]:
    with megazero.zero.GatheredParameters(list(engine.module.parameters())):
        return [p.detach().clone() for p in engine.module.parameters()]


def assert_same(engine: Any, model: nn.Module) -> None:
    for ours, theirs in zip(weights(engine), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


# What is left out


@pytest.mark.parametrize("stage", STAGES)
def test_a_plain_loop_with_neither_precision_nor_optimizer_in_the_config(
    stage: int, capsys: pytest.CaptureFixture
) -> None:
    model = net()
    engine = started(model, stage, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
    said = capsys.readouterr().out
    assert f"ZeRO stage {stage}, float32, micro-batch 4 x 1 accumulation steps, 4 samples per step, no clipping" in said
    reference = net()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    assert steps(engine) == pytest.approx(plain_steps(reference, optimizer), rel=1e-6)
    assert_same(engine, reference)


def test_no_optimizer_is_adamw_and_said(capsys: pytest.CaptureFixture) -> None:
    engine = started()
    assert "no optimizer is given, here or in the config: AdamW with lr 1e-3" in capsys.readouterr().out
    assert type(engine.optimizer) is torch.optim.AdamW
    assert engine.get_lr() == [1e-3] and engine.optimizer.param_groups[0]["weight_decay"] == 0.01


def test_auto_batch_sizes_become_the_defaults_and_are_said(capsys: pytest.CaptureFixture) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    engine = started(config={**dict.fromkeys(names, "auto"), "zero_optimization": {"stage": 2}})
    assert engine.train_batch_size() == 1
    assert re.search("left to the defaults: .*train_micro_batch_size_per_gpu = 1", capsys.readouterr().out)


def test_a_half_precision_model_without_precision_in_the_config_becomes_float32(capsys: pytest.CaptureFixture) -> None:
    engine = started(net().bfloat16())
    assert "the model's bfloat16 parameters become float32, as the config enables neither" in capsys.readouterr().out
    steps(engine, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {"zero_optimization": {"stage": 1}}}, "train_micro_batch_size_per_gpu: is missing"),
        ({"model": "gpt2"}, "model: is a str; give the torch.nn.Module"),
        ({"model": net().to("meta")}, "on the meta device"),
        ({"optimizer": 3}, "optimizer: is a int; give a torch.optim.Optimizer or a function"),
        ({"optimizer": lambda groups: None}, "optimizer: made a NoneType"),
        ({"optimizer": torch.optim.SGD(net().parameters(), lr=1.0)}, "optimizer: .* no parameter of the model"),
        ({"model_parameters": [{"params": [nn.Parameter(torch.ones(3))]}]}, "group 0 holds a tensor of shape .3,."),
        (
            {"model_parameters": []},
            "model_parameters: 3 parameters require a gradient and are in no group, first.weight",
        ),
        ({"lr_scheduler": 3}, "lr_scheduler: is a int"),
        ({"training_data": iter([1])}, "training_data: is a list_iterator; give a dataset"),
        ({"training_data": []}, "training_data: holds no sample"),
        ({"stage": 1, "optimizer": torch.optim.Adafactor}, "Adafactor needs whole ones or is not known not to"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        started(**arguments)


def test_no_config_and_two_configs_are_named() -> None:
    with pytest.raises(ConfigError, match="none is given; pass config="):
        megazero.initialize(model=net())
    with pytest.raises(ConfigError, match="both config and config_params are given"):
        megazero.initialize(model=net(), config=settings(), config_params=settings())


def test_local_rank_is_a_device_and_a_number() -> None:
    rank = started().local_rank
    assert torch.ones(2).to(rank).device == torch.device(rank) == torch.device("cpu")
    assert nn.Linear(1, 1).to(rank).weight.device.type == "cpu"
    assert rank == 0 and not rank and rank + 1 == 1 + rank == 1 and rank % 2 == 0 and list(range(3))[rank] == 0
    assert f"{rank} {rank:02d} {rank!s}" == "0 00 0" and rank < 1 <= rank + 1 and {rank: 1}[0] == 1


# Optimizers and schedules


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_object_with_groups_and_a_scheduler_object(stage: int) -> None:
    def make(model: Net) -> tuple[torch.optim.Optimizer, Any]:
        groups = [{"params": model.first.parameters(), "lr": 0.1}, {"params": [model.second.weight]}]
        optimizer = torch.optim.SGD(groups, lr=0.3, momentum=0.9, weight_decay=0.01)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    model, reference = net(), net()
    optimizer, scheduler = make(model)
    engine, same, _, returned = megazero.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=settings(stage)
    )
    assert same is optimizer and returned is scheduler and engine.get_lr() == [0.1, 0.3]
    plain, plain_scheduler = make(reference)
    assert steps(engine) == pytest.approx(plain_steps(reference, plain, scheduler=plain_scheduler), rel=1e-6)
    assert_same(engine, reference)
    assert engine.get_lr() == pytest.approx([0.1 / 8, 0.3 / 8])
    engine.set_lr(0.25)
    assert engine.get_lr() == [0.25, 0.25]


def test_functions_that_make_the_optimizer_and_the_scheduler() -> None:
    engine, optimizer, _, scheduler = megazero.initialize(
        model=net(),
        optimizer=lambda groups: torch.optim.Adagrad(groups, lr=0.1),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1),
        config=settings(2),
    )
    reference = net()
    made = torch.optim.Adagrad(reference.parameters(), lr=0.1)
    plain = plain_steps(reference, made, scheduler=torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.1))
    assert steps(engine) == pytest.approx(plain, rel=1e-6)
    assert isinstance(optimizer, torch.optim.Adagrad) and scheduler.get_last_lr() == pytest.approx([1e-4])


@pytest.mark.parametrize("zero", [{}, {"offload_optimizer": {"device": "cpu"}}], ids=["device", "host"])
def test_an_optimizer_that_has_a_state_before_it_steps(zero: dict[str, Any]) -> None:
    model, reference = net(), net()
    config = settings(2)
    config["zero_optimization"] |= zero
    made = [torch.optim.Adagrad(of.parameters(), lr=0.1, initial_accumulator_value=0.5) for of in (model, reference)]
    engine, *_ = megazero.initialize(model=model, optimizer=made[0], config=config)
    assert steps(engine) == pytest.approx(plain_steps(reference, made[1]), rel=1e-6)
    assert_same(engine, reference)
    stepped = torch.optim.Adagrad(reference.parameters())
    stepped.load_state_dict(made[1].state_dict())
    with pytest.raises(ConfigError, match="has stepped"):
        megazero.initialize(model=reference, optimizer=stepped, config=config)


def test_groups_of_named_parameters_and_the_rest_frozen() -> None:
    model = net()
    model.second.requires_grad_(False)
    engine = started(model, 2, model_parameters=[{"params": list(model.named_parameters()), "lr": 0.5}])
    before = weights(engine)
    steps(engine, 1)
    assert engine.get_lr() == [0.5]
    assert [bool(torch.equal(a, b)) for a, b in zip(before, weights(engine), strict=True)] == [False, False, True]


def test_what_is_given_twice_is_said_or_refused(capsys: pytest.CaptureFixture) -> None:
    model = net()
    more = {
        "optimizer": {"type": "Adam", "params": {"lr": 1.0}},
        "scheduler": {"type": "WarmupLR", "params": {}},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    engine = started(model, more=more, optimizer=optimizer, lr_scheduler=scheduler)
    said = capsys.readouterr().out
    assert "the config's optimizer, AdamW, is not used" in said and "the config's scheduler, WarmupLR, is not" in said
    assert engine.optimizer is optimizer
    other = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(net().parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="lr_scheduler: sets the rates of another optimizer"):
        started(lr_scheduler=other)
    model = net()
    with pytest.raises(ConfigError, match="first.weight is there twice"):
        started(model, model_parameters=[*model.parameters(), model.first.weight])
    used = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain_steps(model, used, 1)
    with pytest.raises(ConfigError, match="has stepped or loaded a state already"):
        started(model, optimizer=used)


# Calls in the wrong place


@pytest.mark.parametrize("stage", STAGES)
def test_calls_of_the_plain_loop_are_refused_with_the_right_one(stage: int) -> None:
    engine = started(stage=stage)
    with pytest.raises(MegazeroError, match=r"call engine.backward\(loss\)"):
        engine(inputs()).backward()
        engine.step()
    engine.zero_grad()
    with pytest.raises(MegazeroError, match="step: no backward has been run"):
        engine.step()
    engine.backward(engine(inputs()))
    with pytest.raises(MegazeroError, match="call engine.step"):
        engine.optimizer.step()
    with torch.no_grad(), pytest.raises(MegazeroError, match="the loss needs no gradient"):
        engine.backward(engine(inputs()))
    with pytest.raises(MegazeroError, match="a loss of one element, not one of shape .2,."):
        engine.backward(torch.ones(2, requires_grad=True))
    engine.step()


def test_a_model_with_nothing_to_train_evaluates_only() -> None:
    engine = started(net().requires_grad_(False), 3)
    assert float(engine(inputs())) == float(net()(inputs()))
    assert engine.optimizer is None and engine.get_lr() == [] and engine.get_global_grad_norm() is None
    with pytest.raises(MegazeroError, match="nothing to train"):
        engine.backward(engine(inputs()))


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_can_be_forgotten(stage: int) -> None:
    engine, reference = started(stage=stage, more={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}), net()
    engine.backward(engine(inputs(9)))
    engine.zero_grad()
    plain = plain_steps(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    assert steps(engine) == pytest.approx(plain, rel=1e-6)


# An nn.Module around the module


def test_the_engine_is_a_module_that_passes_attributes_through() -> None:
    engine = started(net())
    assert isinstance(engine, nn.Module) and engine.nickname == "net" and engine.first is engine.module.first
    with pytest.raises(AttributeError, match="nickmane"):
        engine.nickmane  # noqa: B018
    assert engine.train() is engine and engine.module.training
    assert engine.eval() is engine and not engine.module.first.training
    assert [name for name, _ in engine.named_parameters()] == [f"module.{n}" for n, _ in net().named_parameters()]
    assert list(engine.parameters()) == list(engine.module.parameters())
    assert list(engine.state_dict()) == [f"module.{name}" for name in net().state_dict()]


@pytest.mark.parametrize("stage", STAGES)
def test_moves_that_change_nothing_pass_and_others_are_named(stage: int) -> None:
    engine = started(stage=stage)
    assert engine.to(engine.local_rank) is engine.to("cpu") is engine.float() is engine
    for change in (engine.half, lambda: engine.to(torch.bfloat16), lambda: engine.to("meta")):
        with pytest.raises(MegazeroError, match="keeps its parameters in torch.float32 on cpu"):
            change()
    steps(engine, 1)


@pytest.mark.parametrize("change", ["half", "data"])
def test_other_data_in_a_parameter_is_named_at_the_next_step(change: str) -> None:
    engine = started(stage=1)
    steps(engine, 1)
    loss = engine(inputs())
    if change == "half":
        engine.module.half()
    else:
        engine.module.second.weight.data = torch.ones(1, 8)
    engine.backward(loss)
    with pytest.raises(MegazeroError, match=r"(first|second).weight was given other data.*Change values in place"):
        engine.step()


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_changes_in_place_between_steps_stay_in_16_bits_too(stage: int) -> None:
    more = {"bf16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": 1e-4}}}
    engine = started(stage=stage, more=more)
    engine.backward(engine(inputs().bfloat16()))
    engine.step()
    engine.module.load_state_dict({name: torch.full_like(value, 0.5) for name, value in net().state_dict().items()})
    engine.backward(engine(inputs().bfloat16()))
    engine.step()
    for value in weights(engine):
        torch.testing.assert_close(value, torch.full_like(value, 0.5), rtol=0.01, atol=0)


def test_float32_buffers_stay_under_bf16_and_inputs_are_cast_where_asked() -> None:
    engine = started(more={"fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 0}})
    assert engine.module.scale.dtype == torch.float32 and engine.module.scale == torch.tensor(1 / 3)
    assert engine(inputs(), y=torch.ones(4, 1)).dtype == torch.float16


# Data


def test_the_loader_gives_epochs_of_their_own_order_and_train_batch_goes_on_through_them() -> None:
    data = [(torch.full((6,), float(i)), torch.tensor([float(i)])) for i in range(6)]
    given = {**settings(), "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    engine, _, loader, _ = megazero.initialize(model=net(), config=given, training_data=data)
    first, second = ([x[:, 0].tolist() for x, _ in loader] for _ in range(2))
    assert first != second and sorted(sum(first, [])) == sorted(sum(second, [])) == [0, 1, 2, 3, 4, 5]
    for _ in range(3):  # 2 micro-batches of 3 an epoch, so the second step goes over its end
        loss = engine.train_batch()
    assert loss.shape == () and engine.global_steps == 3 and engine.global_samples == 12
    before = weights(engine)
    value = engine.eval_batch(iter([(inputs(), torch.zeros(4, 1))] * 2))
    assert float(value) == pytest.approx(float(engine(inputs()))) and not value.requires_grad and engine.training
    assert all(torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True))
    with pytest.raises(MegazeroError, match="give an iterator over batches, or training_data"):
        started().train_batch()
    other = started()
    other.training_dataloader = loader
    assert other.training_dataloader is loader and other.train_batch().isfinite()
    with pytest.raises(MegazeroError, match="must return a loss of one element"):
        started(nn.Linear(6, 2)).train_batch(iter([inputs()]))


def test_a_collate_function_and_a_short_last_batch() -> None:
    given = {**settings(), "train_micro_batch_size_per_gpu": 2}
    for drop, sizes in ((False, [2, 2, 1]), (True, [2, 2])):
        *_, loader, _ = megazero.initialize(
            model=net(),
            config={**given, "dataloader_drop_last": drop},
            training_data=list(range(5)),
            collate_fn=lambda samples: {"x": torch.tensor(samples)},
        )
        assert [len(batch["x"]) for batch in loader] == sizes


# Accumulation


@pytest.mark.parametrize("stage", STAGES)
def test_the_caller_may_say_which_micro_step_is_the_last(stage: int) -> None:
    more = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, reference = started(stage=stage, more=more), net()
    for index, last in enumerate((False, False, True)):
        engine.set_gradient_accumulation_boundary(last)
        assert engine.is_gradient_accumulation_boundary() is last
        engine.backward(engine(inputs(index)))
        engine.step()
        reference(inputs(index)).backward()
    assert engine.global_steps == 1
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), float("inf"))
    assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_the_batch_size_is_changed_between_steps(stage: int) -> None:
    """One, three, then two micro-batches a step, as a plain loop takes them; samples and boundaries follow."""
    model, plain = net(), net()
    engine = started(model, stage, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.5))
    update = torch.optim.SGD(plain.parameters(), lr=0.5)
    micro_step = 0
    for count in (1, 3, 2, 2):
        engine.set_train_batch_size(4 * count)
        assert engine.get_batch_info() == (4 * count, 4, count)
        update.zero_grad()
        for number in range(count):
            assert engine.is_gradient_accumulation_boundary() == (number == count - 1)
            (plain(inputs(micro_step)) / count).backward()
            engine.backward(engine(inputs(micro_step)))
            engine.step()
            micro_step += 1
        update.step()
        with megazero.zero.GatheredParameters(list(model.parameters())):
            for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(found, wanted)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (4, 8, 32)


def test_a_batch_size_that_cannot_be_is_named() -> None:
    engine = started(more={"gradient_accumulation_steps": 2})
    for total, message in ((6, "6 is not a multiple of .* use 4 or 8"), (0, "is 0; use"), (8.0, "is 8.0; use")):
        with pytest.raises(ConfigError, match=f"train_batch_size: {message}"):
            engine.set_train_batch_size(total)
    engine.backward(engine(inputs()))
    engine.step()
    with pytest.raises(MegazeroError, match="set_train_batch_size: micro-batches of a step have been accumulated"):
        engine.set_train_batch_size(12)
    engine.zero_grad()
    engine.set_train_batch_size(12)
    assert engine.gradient_accumulation_steps() == 3


def test_after_a_load_steps_are_counted_by_the_batch_size_of_now(tmp_path: Path) -> None:
    engine = started()
    steps(engine, 1)
    engine.set_train_batch_size(8)
    engine.save_checkpoint(tmp_path)
    engine.set_train_batch_size(12)
    engine.load_checkpoint(tmp_path)
    ends = []
    for _ in range(6):
        ends.append(engine.is_gradient_accumulation_boundary())
        engine.backward(engine(inputs()))
        engine.step()
    assert ends == [False, False, True] * 2


def test_no_sync_is_for_whole_gradients() -> None:
    with pytest.raises(MegazeroError, match="stage 2 cuts gradients"), started(stage=2).no_sync():
        pass


# Divergence and reports


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_gradient_that_is_not_finite_stops_the_run(stage: int, kind: str) -> None:
    engine = started(stage=stage, more={"optimizer": {"type": kind}, "steps_per_print": 3})
    assert engine.get_global_grad_norm() is None
    steps(engine, 1)
    before = weights(engine)
    with pytest.raises(DivergenceError, match="step 2: the gradient is not finite; the weights are those before"):
        for factor in (float("inf"), 1.0):
            engine.backward(engine(inputs()) * factor)
            engine.step()
    assert engine.global_steps == (3 if kind == "AdamW" else 2)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True))
    with pytest.raises(DivergenceError):
        engine.get_global_grad_norm()


def test_lines_are_printed_where_asked(capsys: pytest.CaptureFixture) -> None:
    more = {"steps_per_print": 2, "wall_clock_breakdown": True, "dump_state": True, "prescale_gradients": True}
    engine = started(more=more)
    said = capsys.readouterr().out
    assert '"steps_per_print": 2' in said and "not needed here, and without effect: prescale_gradients" in said
    losses = steps(engine, 4)
    said = capsys.readouterr().out
    found = re.findall(r"step (\d): loss ([\d.e-]+), gradient norm [\d.e-]+, lr 0.001, [\d.e+]+ samples/s", said)
    assert [(int(step), float(loss)) for step, loss in found] == [
        (2, pytest.approx(losses[1], rel=1e-5)),
        (4, pytest.approx(losses[3], rel=1e-5)),
    ]
    assert len(re.findall(r"time per step: forward [\d.]+ ms, backward [\d.]+ ms, step [\d.]+ ms", said)) == 2
    quiet = started()
    capsys.readouterr()
    steps(quiet, 12)
    assert capsys.readouterr().out == ""


class Recorder:
    """In place of Weights & Biases."""

    made: list[Recorder] = []

    def __init__(self, project: str, say: Any) -> None:
        self.project, self.lines = project, []
        Recorder.made.append(self)

    def start(self, config: dict[str, Any], *_: Any) -> None:
        self.config = config

    def log(self, step: int, metrics: Any) -> None:
        self.lines.append((step, dict(metrics)))
        if len(self.lines) == 11:
            raise OSError("the disk is full")

    def close(self) -> None: ...


def test_monitors_get_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(reports, "WeightsAndBiases", Recorder)
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    monkeypatch.setenv("WANDB_RUN_GROUP", "")  # so that it is put back
    where = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    more = {"csv_monitor": where, "tensorboard": where, "wandb": {"enabled": True, "project": "p", "group": "g"}}
    engine = started(more=more)
    losses = steps(engine, 12)
    engine.destroy()
    with (tmp_path / "job" / "Train_Samples_train_loss.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "Train/Samples/train_loss"]
    assert [(int(step), float(loss)) for step, loss in rows[1:]] == [
        (4 * (i + 1), pytest.approx(loss, rel=1e-6)) for i, loss in enumerate(losses)
    ]
    assert list((tmp_path / "job").glob("events.out.tfevents.*"))
    (recorder,) = Recorder.made
    assert recorder.config["train_batch_size"] == 4
    assert [step for step, _ in recorder.lines] == [4 * (i + 1) for i in range(11)]
    assert "Recorder: the disk is full; no further metrics go there" in capsys.readouterr().out
