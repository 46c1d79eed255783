"""zero.Init: weights as without it, never whole on a rank; initialize, from_pretrained and later initialisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import megazero
from megazero.comm import Communicator, _Works
from megazero.zero import GatheredParameters, slices
from megazero.zero.guard import placeholder
from megazero.zero.homes import home_of
from megazero.zero.slices import Pending, Slice
from tests.foreign.models import ADAMW, Odd, batch, build, config, plain, whole_weights
from tests.foreign.test_engine import adamw, check


class Late(nn.Module):
    """Fills its own parameters after its children's, and then everybody's once more, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(9, 4))
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 9, bias=False)
        nn.init.xavier_uniform_(self.table)
        self.head.weight = self.table
        self.apply(self.fill)
        with torch.no_grad():
            self.parts[0].weight.copy_(self.parts[3].weight @ self.parts[2].weight)
            self.parts[1].weight[0] += 3
        self.register_buffer("scale", self.parts[1].weight.detach().abs().max())
        for name, parameter in self.named_parameters():
            if name.endswith("2.weight"):
                parameter.data.normal_(mean=0.0, std=0.02 / parameter.shape[0])
        nn.init.orthogonal_(self.parts[3].weight)

    @staticmethod
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.02)
            if module.bias is not None:
                module.bias.data.zero_()


def built(factory: Callable, dtype: torch.dtype | None) -> dict[str, bool]:
    rank, world = dist.get_rank(), dist.get_world_size()
    wanted = build(factory)
    with megazero.zero.Init(config_dict_or_path=config(3, 1, 0.5), dtype=dtype):
        model = build(factory, seed=3 + rank)  # rank 0's values are every rank's
    found = {}
    for name, parameter in model.named_parameters():
        expected = dict(wanted.named_parameters())[name].to(dtype)
        assert home_of(parameter).values.numel() == -(-parameter.numel() // world)
        with pytest.raises(megazero.MegazeroError, match="GatheredParameters"):
            parameter + 1
        with GatheredParameters(parameter):
            found[name] = torch.equal(parameter, expected) and parameter.shape == expected.shape
    first = next(model.parameters())
    with GatheredParameters(model.parameters(), modifier_rank=world - 1), torch.no_grad():
        first.fill_(rank)
    with GatheredParameters([first]):
        found["modified"] = bool((first == world - 1).all())
    with pytest.raises(megazero.MegazeroError, match="modifier_rank"), GatheredParameters(first):
        first.data.add_(1)
    return found


@pytest.mark.parametrize(("factory", "world"), [(Odd, 2), (Late, 2), (Late, 3), (Late, 1)])
def test_values_are_those_without_it(ranks: Callable, factory: Callable, world: int) -> None:
    for found in ranks(world, built, factory, None):
        assert all(found.values()), found


def test_in_another_dtype(ranks: Callable) -> None:
    for found in ranks(2, built, Odd, torch.bfloat16):
        assert all(found.values()), found


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(50, 50) for _ in range(12))
        self.apply(Late.fill)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.tanh(part(x))
        return x.square().mean()


def most_elements(threshold: int) -> tuple[int, int, int]:
    """(most elements of parameters that were whole at once while building, in initialize beyond shards, of one part)"""
    most = beyond = 0
    storages: dict[int, Any] = {}

    def watch(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal most
        storages[id(parameter)] = parameter
        whole = [p for p in storages.values() if isinstance(home_of(p), Pending) or home_of(p) is None]
        most = max(most, sum(p.numel() for p in whole))

    handle = nn.modules.module.register_module_parameter_registration_hook(watch)
    with megazero.zero.Init():
        model = Chain()
    handle.remove()
    share, take = sum(p.numel() for p in model.parameters()) // dist.get_world_size(), Slice.take

    def taken(place: Slice) -> torch.Tensor:
        nonlocal beyond
        value = take(place)
        homes = [home_of(p) for p in model.parameters()]
        left = sum(h.values.numel() for h in homes if isinstance(h, Slice))
        beyond = max(beyond, left - share + value.numel())
        return value

    Slice.take = taken
    try:
        settings = config(3, 1, 0.0, zero_optimization={"stage3_param_persistence_threshold": threshold})
        engine, *_ = megazero.initialize(model=model, config=settings)
    finally:
        Slice.take = take
    loss = engine(torch.ones(2, 50))
    engine.backward(loss)
    engine.step()
    return most, beyond, 50 * 51


def test_never_more_than_two_modules_whole(ranks: Callable) -> None:
    for most, beyond, part in ranks(2, most_elements, 0):
        assert most <= 3 * part, "two modules, and the one that is being built"
        assert beyond <= part


def train_built(stage: int) -> tuple:
    rank, losses, norms = dist.get_rank(), [], []
    with megazero.zero.Init():
        model = build(Odd, seed=3 + rank)
    engine, *_ = megazero.initialize(model=model, config=config(stage, 1, 0.5, optimizer=ADAMW))
    for step in range(2):
        loss = engine.backward(engine(batch(step, 0, rank)))
        engine.step()
        if dist.get_world_size() > 1:
            dist.all_reduce(loss)
        losses.append(float(loss) / dist.get_world_size())
        norms.append(engine.get_global_grad_norm())
    return losses, norms, whole_weights(engine)


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_training_from_it(ranks: Callable, stage: int, world: int) -> None:
    check(ranks(world, train_built, stage), plain(Odd, adamw, 2, 1, world, clip=0.5))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=31, max_position_embeddings=16, tie_word_embeddings=True, **sizes))


def loaded(directory: str) -> dict[str, Any]:
    from transformers import LlamaForCausalLM

    wanted = LlamaForCausalLM.from_pretrained(directory)
    with megazero.zero.Init():
        model = LlamaForCausalLM.from_pretrained(directory)
        torch.manual_seed(5)
        fresh = llama()
    torch.manual_seed(5)
    plainly = llama()
    found: dict[str, Any] = {}
    for ours, theirs, what in ((model, wanted, "loaded"), (fresh, plainly, "built")):
        names = [name for name, _ in theirs.named_parameters()]
        assert [name for name, _ in ours.named_parameters()] == names
        assert all(isinstance(home_of(p), Slice) for p in ours.parameters())
        for name, parameter in ours.named_parameters():
            with GatheredParameters(parameter):
                found[f"{what} {name}"] = torch.equal(parameter, dict(theirs.named_parameters())[name])
    found["tied"] = model.lm_head.weight is model.model.embed_tokens.weight
    engine, *_ = megazero.initialize(model=model, config=config(3, 1, 0.0, optimizer=ADAMW))
    tokens = batch(0, 0, 0, vocabulary=31)
    with torch.no_grad():
        found["logits"] = torch.allclose(engine(input_ids=tokens).logits, wanted(input_ids=tokens).logits, atol=1e-6)
    return found


def test_from_pretrained(ranks: Callable, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(1)
    llama().save_pretrained(tmp_path)
    for found in ranks(2, loaded, str(tmp_path)):
        assert all(found.values()), found


class OfTheDevice(Communicator):
    """The second rank of two, whose group serves one device; the first rank has ones everywhere."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(None, 2, 1)
        self.device = device

    def broadcast(self, buffer: torch.Tensor, source: int = 0) -> None:
        assert buffer.device == self.device and buffer.is_contiguous()
        buffer.fill_(1.0)

    def all_gather(self, buffers: Sequence[torch.Tensor], slices: Sequence[torch.Tensor]) -> Any:
        assert {value.device for value in (*buffers, *slices)} == {self.device}
        return _Works([])

    def all_reduce(self, buffers: Sequence[torch.Tensor]) -> Any:
        assert {value.device for value in buffers} == {self.device}
        return _Works([])


class Built:
    building = False


def test_ranks_communicate_on_their_device_wherever_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """meta stands for a GPU: what is on one is not on the host, and a group over NCCL serves only the GPUs."""
    gpu, host = torch.device("meta"), torch.device("cpu")
    # Unlike a GPU's, meta's values do not come back, nor can a parameter of the host's be moved there.
    monkeypatch.setattr(Slice, "whole", lambda place: torch.zeros(place.shape))
    monkeypatch.setattr(slices, "placeholder", lambda like, device=None: placeholder(like))
    model = nn.Linear(3, 5)
    places = [Slice(parameter, OfTheDevice(gpu), gpu, Built()) for parameter in model.parameters()]
    with GatheredParameters(model.parameters(), modifier_rank=0):
        assert model.weight.device == model.bias.device == host  # as it was built
        model.weight.data = torch.empty(3, 5).t()
    assert places[0].values.device == gpu and places[0].values.shape == (8,)
    assert model.to(host) is model and model.to(gpu, torch.float32) is model
    assert [place.parameter_device for place in places] == [gpu, gpu]
    with pytest.raises(megazero.MegazeroError, match="GatheredParameters"):
        model.cuda()


def test_who_holds_a_parameter_as_well_sees_its_changes() -> None:
    parameter = nn.Parameter(torch.zeros(5, 3))
    place = Slice(parameter, OfTheDevice(torch.device("cpu")), torch.device("cpu"), Built())
    with GatheredParameters(parameter, modifier_rank=0):
        with GatheredParameters(parameter, modifier_rank=0):
            parameter.data = torch.zeros(3, 5).t()
        assert torch.equal(parameter, torch.ones(5, 3))
    assert torch.equal(place.values, torch.tensor([1.0] * 7 + [0.0]))


def wrong_uses() -> list[str]:
    said = []
    for arguments in (
        {"config": {"zero_optimization": {"stage": 4}, "train_batch_size": 2}},
        {"config_dict_or_path": "no"},
    ):
        with pytest.raises(megazero.MegazeroError) as caught, megazero.zero.Init(**arguments):
            pass
        said.append(str(caught.value))
    with megazero.zero.Init(enabled=False):
        assert home_of(nn.Linear(2, 2).weight) is None
    with pytest.raises(ValueError, match="mine"), megazero.zero.Init():
        nn.Linear(2, 2)
        raise ValueError("mine")
    assert home_of(nn.Linear(2, 2).weight) is None  # the hook is gone
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(megazero.ConfigError, match="weight is on the meta device"):
        megazero.initialize(model=empty, config=config(3, 1, 0.0))
    return said


def test_wrong_uses(ranks: Callable) -> None:
    for said in ranks(2, wrong_uses):
        assert "zero_optimization.stage" in said[0] and "no" in said[1]


def test_one_process_without_a_process_group() -> None:
    with megazero.zero.Init():
        model = build(Odd)
    engine, *_ = megazero.initialize(model=model, config=config(3, 1, 0.0, optimizer=ADAMW))
    engine.backward(engine(batch(0, 0, 0)))
    gradient = megazero.zero.safe_get_full_grad(model.twice.weight)
    engine.step()
    moment = megazero.zero.safe_get_full_optimizer_state(model.twice.weight, "exp_avg")
    assert torch.allclose(moment, 0.1 * gradient)
    with GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
        model.twice.weight.fill_(2.0)
    assert torch.equal(megazero.zero.safe_get_full_fp32_param(model.twice.weight), torch.full((6, 6), 2.0))
    assert not torch.distributed.is_initialized()
