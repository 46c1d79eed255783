"""GatheredParameters, register_external_parameter, and what a parameter is outside them, beside plain torch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import megazero
from megazero.zero import GatheredParameters, register_external_parameter, safe_get_full_fp32_param
from tests.foreign.models import ADAMW, Odd, batch, build, config, loss_of, plain, trained, whole_weights
from tests.foreign.test_engine import adamw, check


def engine_of(stage: int, **sections: Any) -> Any:
    settings = config(stage, 1, 0.5, optimizer=ADAMW, **sections)
    return megazero.initialize(model=build(Odd, seed=3 + dist.get_rank()), config=settings)[0]


def resident(engine: Any) -> int:
    """Bytes of parameters that come and go which are there."""
    return sum(b.flat.untyped_storage().nbytes() for b in engine.sharded.blocks if b.sharding.parameters)


def read_all(stage: int) -> None:
    engine, wanted = engine_of(stage), dict(build(Odd).named_parameters())
    parameters = dict(engine.module.named_parameters())
    for name, parameter in parameters.items():
        assert parameter.shape == wanted[name].shape and isinstance(parameter, nn.Parameter), name
        with GatheredParameters(parameter):
            assert torch.equal(parameter, wanted[name]) and type(parameter) is nn.Parameter, name
    layer, loose = engine.module.layers[0], nn.Parameter(torch.ones(2))
    with GatheredParameters(p for p in [loose, *layer.parameters(), *layer.parameters(), layer.up.weight]):
        with GatheredParameters([layer.up.weight, engine.module.embed.weight]), torch.inference_mode():
            both = layer.up.weight.sum() + engine.module.embed.weight.sum()
        kept, held = layer.up.weight.data, resident(engine)  # the inner context takes nothing away
        assert both == wanted["layers.0.up.weight"].sum() + wanted["embed.weight"].sum()
        with GatheredParameters(engine.module.parameters(), enabled=False):
            assert resident(engine) == held
    assert resident(engine) == 0
    # What the user took along is whole, and stays what it was while training goes on.
    loss = engine(batch(0, 0, dist.get_rank()))
    engine.backward(loss)
    engine.step()
    assert stage < 3 or torch.equal(kept, wanted["layers.0.up.weight"])
    assert resident(engine) == 0


@pytest.mark.parametrize(("stage", "world"), [(1, 2), (2, 2), (3, 2), (3, 3), (3, 1)])
def test_whole_values_inside_memory_back_after(ranks: Callable, stage: int, world: int) -> None:
    ranks(world, read_all, stage)


def change_between_steps(stage: int, precision: str) -> tuple[list, list, dict, bool]:
    engine = engine_of(stage, **({"bf16": {"enabled": True}} if precision == "bf16" else {}))
    rank, losses, same = dist.get_rank(), [], True
    for step in range(3):
        if step == 1:
            before = safe_get_full_fp32_param(engine.module.twice.weight)
            with GatheredParameters(engine.module.parameters(), modifier_rank=1), torch.no_grad():
                engine.module.layers[1].up.weight.mul_(-2.0 if rank == 1 else 7.0)
                engine.module.embed.weight.data[2] = 0.25 * rank
                if rank == 1:
                    engine.module.scale.data = torch.full_like(engine.module.scale, 0.75)
            same = torch.equal(before, safe_get_full_fp32_param(engine.module.twice.weight))
        loss = engine.backward(engine(batch(step, 0, rank)))
        engine.step()
        dist.all_reduce(loss)
        losses.append(float(loss) / 2)
    return losses, [], whole_weights(engine), same


def plain_change() -> tuple[list, list, dict]:
    model = build(Odd).double()
    made, losses = adamw([p for p in model.parameters() if p.requires_grad]), []
    for step in range(3):
        if step == 1:
            with torch.no_grad():
                model.layers[1].up.weight.mul_(-2.0)
                model.embed.weight[2] = 0.25
                model.scale.fill_(0.75)
        loss = sum(loss_of(model, batch(step, 0, rank)) for rank in range(2)) / 2
        made.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None and p.requires_grad else p.grad
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        made.step()
        losses.append(loss.item())
    return losses, [], {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_modifier_ranks_changes_are_everybodys(ranks: Callable, stage: int) -> None:
    check([result[:3] for result in ranks(2, change_between_steps, stage, "fp32")], plain_change())


@pytest.mark.parametrize("stage", [1, 3])
def test_masters_take_the_changes_and_keep_the_rest(ranks: Callable, stage: int) -> None:
    wanted = plain_change()
    for losses, _, _, same in ranks(2, change_between_steps, stage, "bf16"):
        assert same, "a master of a parameter that was not changed lost its low bits"
        assert losses == pytest.approx(wanted[0], rel=2e-2)


def forbidden_change(how: str) -> tuple[str, bool]:
    engine = engine_of(3)
    target = {
        "data": "layers.1.up.weight",
        "last": "layers.2.three",
        "persistent": "scale",
        "other": "layers.1.norm.bias",
    }
    parameter = dict(engine.module.named_parameters())[target.get(how, "layers.1.up.weight")]
    listed = engine.module.layers[1].up.weight if how == "other" else parameter
    with pytest.raises(megazero.MegazeroError) as caught:
        with GatheredParameters(listed, modifier_rank=0 if how == "other" else None):
            if dist.get_rank() == dist.get_world_size() - 1:
                if how == "in place":
                    nn.init.ones_(parameter)
                elif how == "negated":
                    parameter.data.neg_()
                else:
                    parameter.data.view(-1)[-1:] += 1e-3
    with GatheredParameters(engine.module.layers[1].up.weight):
        unchanged = torch.equal(engine.module.layers[1].up.weight, build(Odd).layers[1].up.weight)
    return str(caught.value), unchanged and resident(engine) == 0


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("in place", "layers.1.up.weight"),
        ("data", "layers.1.up.weight"),
        ("negated", "layers.1.up.weight"),
        ("last", "layers.2.three"),
        ("persistent", "scale"),
        ("other", "layers.1.norm.bias"),
    ],
)
def test_case_34_a_change_that_nobody_announced_is_an_error_everywhere(ranks: Callable, how: str, name: str) -> None:
    for message, unchanged in ranks(2, forbidden_change, how):
        assert name in message and "modifier_rank" in message and unchanged


class Borrower(nn.Module):
    """Its forward uses a weight of a module that has run, and one of a module that has not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed, self.head = nn.Embedding(13, 6), nn.Linear(6, 13)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        if how == "register":
            register_external_parameter(self, self.embed.weight)
            register_external_parameter(self, self.layers[1].weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embed(tokens[:, :-1]))
        x = checkpoint(self.borrow, x, use_reentrant=False) if self.how == "recompute" else self.borrow(x)
        x = self.layers[2](self.layers[1](x))
        with GatheredParameters([self.embed.weight], enabled=self.how in ("gather", "recompute")):
            logits = self.head(x) + x @ self.embed.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def borrow(self, x: torch.Tensor) -> torch.Tensor:
        with GatheredParameters(self.layers[1].weight, enabled=self.how in ("gather", "recompute")):
            return x + torch.tanh(x * self.layers[1].weight[0] @ self.layers[1].weight)


def gathering() -> nn.Module:
    return Borrower("gather")


def recomputing() -> nn.Module:
    return Borrower("recompute")


def registered() -> nn.Module:
    return Borrower("register")


def late() -> nn.Module:
    return Borrower("late")


def register_late(model: nn.Module) -> dict:
    register_external_parameter(model, model.embed.weight)
    register_external_parameter(model, model.layers[1].weight)
    return {}


@pytest.mark.parametrize(
    ("stage", "factory"),
    [(1, registered), (2, gathering), (3, gathering), (3, registered), (3, recomputing), (3, late)],
)
def test_weights_of_other_modules_in_a_forward(ranks: Callable, stage: int, factory: Callable) -> None:
    settings = config(stage, 2, 0.0, optimizer=ADAMW)
    check(ranks(2, trained, factory, settings, 3), plain(factory, adamw, 3, 2, 2, clip=0.0))


def train_registered_after() -> tuple:
    rank = dist.get_rank()
    engine, *_ = megazero.initialize(model=build(late, 3 + rank), config=config(3, 1, 0.0, optimizer=ADAMW))
    register_late(engine.module)
    losses = []
    for step in range(2):
        loss = engine.backward(engine(batch(step, 0, rank)))
        engine.step()
        dist.all_reduce(loss)
        losses.append(float(loss) / 2)
    return losses, [], whole_weights(engine)


def test_registered_after_initialize(ranks: Callable) -> None:
    losses, _, weights = plain(late, adamw, 2, 1, 2, clip=0.0)
    check(ranks(2, train_registered_after), (losses, [], weights))


class Rows(nn.Module):
    """Returns its own weight, or rows of it: of what is let go when it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6))

    def forward(self, count: int | None = None) -> torch.Tensor:
        return self.weight if count is None else self.weight[:count]


class Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.table, self.embed = Rows(), Rows(), nn.Embedding(13, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1]) + self.rows(8)
        return (torch.tanh(x) @ self.table().t()).square().mean()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_module_may_return_its_weight(ranks: Callable, stage: int) -> None:
    settings = config(stage, 1, 0.0, optimizer=ADAMW)
    check(ranks(2, trained, Returning, settings, 2), plain(Returning, adamw, 2, 1, 2, clip=0.0))


USES: dict[str, Callable[[nn.Parameter, Any], Any]] = {
    "data": lambda p, e: p.data,
    "add": lambda p, e: p + 1,
    "norm": lambda p, e: p.norm(),
    "index": lambda p, e: p[0],
    "numpy": lambda p, e: p.detach().numpy(),
    "tolist": lambda p, e: p.tolist(),
    "to": lambda p, e: p.to(torch.float64),
    "clone": lambda p, e: p.clone(),
    "linear": lambda p, e: F.linear(torch.ones(2, 6), p),
    "functional": lambda p, e: torch.func.functional_call(nn.Linear(6, 7), {"weight": p}, (torch.ones(2, 6),)),
    "cat": lambda p, e: torch.cat([p, p]),
    "out": lambda p, e: torch.zeros(7, 6).copy_(p),
    "init": lambda p, e: nn.init.normal_(p),
    "in place": lambda p, e: torch.no_grad()(lambda: p.mul_(2))(),
    "assign data": lambda p, e: setattr(p, "data", torch.zeros(7, 6)),
    "fill": lambda p, e: p.data.fill_(1.0),
    "storage": lambda p, e: p.untyped_storage(),
    "pointer": lambda p, e: p.data_ptr(),
    "dlpack": lambda p, e: torch.from_dlpack(p),
    "deepcopy": lambda p, e: copy.deepcopy(p),
    "copy the module": lambda p, e: copy.deepcopy(e.module),
    "pickle": lambda p, e: pickle.dumps(p),
    "save": lambda p, e: torch.save(p, io.BytesIO()),
    "state_dict": lambda p, e: torch.save(e.module.state_dict(), io.BytesIO()),
    "state_dict on the CPU": lambda p, e: {name: value.cpu() for name, value in e.module.state_dict().items()},
    "state_dict as safetensors": lambda p, e: safetensors.torch.save(e.module.state_dict()),
    "engine's state_dict": lambda p, e: {name: value.clone() for name, value in e.state_dict().items()},
    "load_state_dict": lambda p, e: e.module.load_state_dict(build(Odd).state_dict()),
    "half": lambda p, e: e.module.half(),
    "vector": lambda p, e: nn.utils.parameters_to_vector(e.module.layers[0].up.parameters()),
}


def uses_of_a_cut_parameter() -> dict[str, str]:
    engine = engine_of(3)
    parameter, said = engine.module.layers[0].up.weight, {}
    for name, use in USES.items():
        try:
            said[name] = f"no error: {use(parameter, engine)}"
        except (megazero.MegazeroError, RuntimeError) as error:
            said[name] = f"{error}"
    assert parameter.shape == (7, 6) and parameter.numel() == 42 and parameter.dtype == torch.float32
    assert isinstance(parameter, nn.Parameter) and parameter in set(engine.module.parameters())
    assert "cut over ranks, shape (7, 6)" in f"{parameter} {parameter!r}" and "Odd" in repr(engine.module)
    # What goes past torch's dispatch reads one nan, not memory that is not there.
    with torch._C.DisableTorchFunctionSubclass():
        assert parameter.isnan().all()
    engine.to(engine.device), engine.module.to(torch.float32), engine.module.to("cpu", torch.float32)
    with pytest.raises(megazero.MegazeroError, match="ranks 0 to 0|ranks 0 to 1"):
        GatheredParameters(parameter, modifier_rank=7).__enter__()
    with pytest.raises(megazero.MegazeroError, match="takes a torch.nn.Module"):
        register_external_parameter(engine.module, torch.ones(2))
    engine.backward(engine(batch(0, 0, 0)))
    with pytest.raises(megazero.MegazeroError, match=r"inside `with GatheredParameters"):
        with GatheredParameters(parameter):
            engine.step()
    assert resident(engine) == 0
    return said


@pytest.mark.parametrize("world", [1, 2])
def test_any_use_outside_is_an_error_with_the_remedy(ranks: Callable, world: int) -> None:
    for said in ranks(world, uses_of_a_cut_parameter):
        assert [name for name, message in said.items() if "GatheredParameters" not in message] == [], said


def read_right_after_a_step(stage: int) -> bool:
    """Updated slices are on their way when step returns."""
    engine = engine_of(stage)
    engine.backward(engine(batch(0, 0, dist.get_rank())))
    engine.step()
    found = {name: value.clone() for name, value in engine.module.state_dict().items()}
    twin = copy.deepcopy(engine.module)
    assert torch.equal(twin.head.weight, found["head.weight"]) and twin.head.weight is twin.embed.weight
    sent = pickle.loads(pickle.dumps(engine.module))
    with torch.no_grad():
        assert torch.equal(sent(batch(0, 0, 0)), twin(batch(0, 0, 0)))
    weights = whole_weights(engine)
    return all(torch.equal(found[name], value) for name, value in weights.items())


def test_parameters_that_are_whole_can_be_read_at_any_time(ranks: Callable) -> None:
    for stage in (1, 2):
        assert ranks(2, read_right_after_a_step, stage) == [True, True]
