"""A model as a list of layers, of which every process builds those of its own pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megazero.checkpoint.rng import rng_state, set_rng_state
from megazero.errors import ConfigError, MegazeroError
from megazero.foreign.pipe.specs import (
    Layer,
    LayerSpec,
    TiedLayerSpec,
    brought,
    divide,
    type_name,
    within_reach,
)
from megazero.foreign.start import start_topology, timeout_of
from megazero.layout import Layout
from megazero.pipeline.p2p import neighbour_groups
from megazero.topology import Topology
from megazero.zero.homes import EXTERNAL, home_of

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]


class PipelineModule(nn.Module):
    """The layers of one stage; made by every process alike, before `megazero.initialize`, which takes it as the model.

    Args:
        layers: LayerSpecs, modules, or functions, each applied to what the one before gives: a tensor, or a tuple of
            tensors, which the next one gets as one argument. A module that is there twice is one module, as a
            TiedLayerSpec is.
        num_stages: of the pipeline; processes beyond that are data-parallel. Or a ``topology``.
        loss_fn: (what the last layer gives, the batch's labels) → the loss; unset: the last layer gives it.
        seed_layers: draw layer i's values from ``base_seed`` + i; unset: from a seed that the first process draws. In
            either case they do not depend on the number of stages.
        seed_fn: what to call with that seed; unset: torch.manual_seed.
        partition_method: see ``specs.divide``.
        activation_checkpoint_interval: layers whose activations are computed again in backward, together; 0: none.
        checkpointable_layers: names of the classes whose layers may be; unset: all that have parameters.
        dynamic_shape: what passes between stages may have another shape in every micro-batch.

    Parameters have the names that nn.Sequential of the layers would give them: ``{index}.weight``, and a tied one that
    of its first layer. Raises ConfigError.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        num_stages: int | None = None,
        topology: Topology | Layout | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        layers = _checked(layers)
        if not isinstance(activation_checkpoint_interval, int) or activation_checkpoint_interval < 0:
            told = f"{activation_checkpoint_interval!r} is no number of layers; use 0 for no recomputation"
            raise ConfigError.single("activation_checkpoint_interval", told)
        for name, function in (("loss_fn", loss_fn), ("seed_fn", seed_fn)):
            if function is not None and not callable(function):
                raise ConfigError.single(name, f"is a {type(function).__name__}; give a function, or leave it out")
        if checkpointable_layers is not None:
            _check_names(checkpointable_layers, layers)
        self.topology = _topology(num_stages, topology)
        self.dynamic_shape = dynamic_shape
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self._checkpointable = checkpointable_layers
        layout, rank = self.topology.layout, self.topology.rank
        self.num_stages, self.stage_id = layout.pp, self.topology.coordinates["pp"]
        self.pairs = neighbour_groups(layout, rank, False, timeout_of(self.topology.device))  # first: see its note
        base = base_seed if seed_layers else _drawn_seed(self.topology)
        state = rng_state(self.topology.device)
        self.partition = divide(layers, layout.pp, partition_method)
        names = _names(layers)
        self.tied = _tied(names, self.partition)
        _make_groups(self.topology, self.tied)
        self._calls: list[Callable[[Any], Any]] = []
        for index in self.partition[self.stage_id]:
            name = names[index]
            if str(name) not in self._modules:
                (seed_fn or torch.manual_seed)(base + name)
                self._add(name, layers[name])
            self._calls.append(self._call_of(index, name, layers[index]))
        set_rng_state(state, self.topology.device)
        self.loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
        if self.is_last_stage:
            self.loss_fn = loss_fn
        _check_not_shared(self, layers)
        self._agree_on_tied()
        self._strangers = list(self._out_of_layers(layers))

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.num_stages - 1

    def forward(self, x: Any) -> Any:
        """What the stage before gives → what this stage's last layer gives."""
        interval = self.activation_checkpoint_interval
        for start in range(0, len(self._calls), interval or len(self._calls)):
            calls = self._calls[start : start + (interval or len(self._calls))]
            if interval and torch.is_grad_enabled() and self._may_recompute(calls):
                x = checkpoint(_through, calls, x, use_reentrant=False)
            else:
                x = _through(calls, x)
        return x

    def check_strangers(self) -> None:
        """MegazeroError where a backward has come to a parameter that no layer here holds, and no step would change."""
        for who, parameter in self._strangers:
            if parameter.grad is not None:
                raise MegazeroError(
                    f"{who} uses a parameter of shape {tuple(parameter.shape)} that no layer of its stage has, and "
                    "that would not be trained; give its module as a layer, or as a TiedLayerSpec where another layer "
                    "is it as well, with forward_fn for what is computed here"
                )

    def _out_of_layers(self, layers: Sequence[Layer]) -> Iterator[tuple[str, nn.Parameter]]:
        """(who, a parameter) for what this stage's functions may use of others."""
        functions = [(f"layer {index}", layers[index]) for index in self.partition[self.stage_id]]
        functions = [(who, getattr(layer, "forward_fn", layer)) for who, layer in functions]
        held = set(self.parameters())
        for who, function in (*functions, ("loss_fn", self.loss_fn)):
            if callable(function) and not isinstance(function, nn.Module):
                for parameter in dict.fromkeys(within_reach(function)):
                    if parameter not in held:
                        yield who, parameter

    def _may_recompute(self, calls: Sequence[Callable]) -> bool:
        if self._checkpointable is not None:
            return all(type_name(call) in self._checkpointable for call in calls)
        modules = [call for call in calls if isinstance(call, nn.Module)]
        return any(isinstance(module, _Use) or next(module.parameters(), None) is not None for module in modules)

    def _add(self, index: int, layer: Layer) -> None:
        made = layer.build() if isinstance(layer, LayerSpec) else layer
        if not isinstance(made, nn.Module):
            return
        if any(home_of(parameter) is not None for parameter in made.parameters()):
            raise ConfigError.single(
                "layers",
                f"layer {index} was cut by zero.Init or is in an engine; make the PipelineModule outside of it, as a "
                "process holds its own stage's layers only",
            )
        self.add_module(str(index), made)

    def _call_of(self, index: int, name: int, layer: Layer) -> Callable[[Any], Any]:
        made = self._modules.get(str(name), layer)
        if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
            made = _Use(made, layer.forward_fn)
            self.add_module(f"{index}_use", made)
        return made

    @torch.no_grad()
    def _agree_on_tied(self) -> None:
        """Layers may have been built with other values, where they are the user's modules: the first stage's hold."""
        device = self.topology.device
        for name, stages in self.tied.items():
            if self.stage_id not in stages:
                continue
            communicator = self.topology.communicator("pp", stages)
            for parameter in self._modules[str(name)].parameters():
                value = parameter.detach().to(device, copy=True).contiguous()
                if value.numel():
                    communicator.broadcast(value)
                parameter.copy_(value)


class _Use(nn.Module):
    """A function of a tied module, as a module of its own: so its parameters are there when it runs."""

    def __init__(self, tied: nn.Module, function: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.call = partial(function, tied)
        self.__dict__[EXTERNAL] = list(tied.parameters())

    def forward(self, x: Any) -> Any:
        return self.call(x)


def _through(calls: Sequence[Callable[[Any], Any]], x: Any) -> Any:
    for call in calls:
        x = call(x)
    return x


def _checked(given: Iterable[Layer]) -> list[Layer]:
    if not isinstance(given, Iterable):
        raise ConfigError.single("layers", f"is a {type(given).__name__}; give a list of layers")
    layers = list(given)
    if not layers:
        raise ConfigError.single("layers", "is empty; give at least one layer")
    for index, layer in enumerate(layers):
        if not isinstance(layer, LayerSpec) and (isinstance(layer, type) or not callable(layer)):
            kind = f"the class {layer.__name__}" if isinstance(layer, type) else f"a {type(layer).__name__}"
            raise ConfigError.single("layers", f"layer {index} is {kind}; give a LayerSpec, a module or a function")
    first: dict[str, tuple[int, TiedLayerSpec]] = {}
    for index, layer in enumerate(layers):
        if not isinstance(layer, TiedLayerSpec):
            continue
        place, other = first.setdefault(layer.key, (index, layer))
        if other.typename is not layer.typename:
            raise ConfigError.single(
                "layers",
                f"layers {place} and {index} are tied as {layer.key!r}, one of {other.typename.__name__} and one of "
                f"{layer.typename.__name__}; one module serves both: give the same class, and another use of it as "
                "forward_fn",
            )
    return layers


def _check_names(names: Sequence[str], layers: Sequence[Layer]) -> None:
    there = dict.fromkeys(map(type_name, layers))
    if isinstance(names, str) or (names and not set(names) & there.keys()):
        told = f"{names!r} is no list of names of layers' classes, some of which are here; there are {', '.join(there)}"
        raise ConfigError.single("checkpointable_layers", told)


def _topology(num_stages: int | None, topology: Topology | Layout | None) -> Topology:
    if isinstance(topology, Topology):
        layout = topology.layout
    elif isinstance(topology, Layout):
        layout = topology
    elif topology is not None:
        kind = type(topology).__name__
        raise ConfigError.single("topology", f"is a {kind}; give a megazero.layout.Layout(pp=..., dp=...)")
    elif num_stages is None:
        raise ConfigError.single("num_stages", "is not given, nor is a topology; say how many stages the pipeline has")
    else:
        if not isinstance(num_stages, int) or num_stages < 1:
            raise ConfigError.single("num_stages", f"{num_stages!r} is no number of stages; use 1 or more")
        return start_topology(num_stages)
    if layout.tp > 1:
        raise ConfigError.single("topology", f"has tp {layout.tp}; layers of a pipeline are not cut here: use tp 1")
    if num_stages not in (None, layout.pp):
        raise ConfigError.single("num_stages", f"is {num_stages}, and the topology has {layout.pp}; leave out one")
    if isinstance(topology, Topology):
        return topology
    made = start_topology(layout.pp)
    if made.layout != layout:
        size = made.layout.world_size
        raise ConfigError.single(
            "topology",
            f"is of {layout.pp} stages x {layout.dp} data-parallel processes, and there are {size} processes",
        )
    return made


def _names(layers: Sequence[Layer]) -> list[int]:
    """Of each layer the index under which its module is registered: the first of those that are tied to it."""
    first: dict[Any, int] = {}
    return [
        first.setdefault(
            ("key", layer.key)
            if isinstance(layer, TiedLayerSpec)
            else ("module", id(layer))
            if isinstance(layer, nn.Module)
            else ("own", index),
            index,
        )
        for index, layer in enumerate(layers)
    ]


def _tied(names: Sequence[int], partition: Sequence[range]) -> dict[int, tuple[int, ...]]:
    """Layers that several stages hold → those stages."""
    holders: dict[int, list[int]] = {}
    for stage, indices in enumerate(partition):
        for name in dict.fromkeys(names[index] for index in indices):
            holders.setdefault(name, []).append(stage)
    return {name: tuple(stages) for name, stages in sorted(holders.items()) if len(stages) > 1}


def _make_groups(topology: Topology, tied: dict[int, tuple[int, ...]]) -> None:
    """Of the stages that hold a layer together; as many on every rank: see p2p, [Note: groups that only their members
    make]."""
    every = tuple(range(topology.layout.pp))
    for stages in sorted({stages for stages in tied.values() if stages != every}):
        if topology.coordinates["pp"] in stages:
            topology.group("pp", stages)
        else:
            dist.new_group([topology.rank], use_local_synchronization=True)


def _drawn_seed(topology: Topology) -> int:
    """Of the first process's generator, whatever the others' are set to; one that any library takes."""
    seed = torch.randint(2**31, (1,), dtype=torch.int64).to(topology.device)
    if topology.world.size > 1:
        topology.world.broadcast(seed)
    return int(seed)


def _check_not_shared(module: PipelineModule, layers: Sequence[Layer]) -> None:
    """ConfigError where modules of different stages share a parameter, which would be two from here on."""
    stage_of = {index: stage for stage, indices in enumerate(module.partition) for index in indices}
    seen: dict[nn.Parameter, int] = {}
    for index, layer in enumerate(layers):
        for parameter in brought(layer):
            first = seen.setdefault(parameter, index)
            if stage_of[first] != stage_of[index] and layers[first] is not layer:
                raise ConfigError.single(
                    "layers",
                    f"layers {first} and {index} share a parameter and are on different stages; make both a "
                    "TiedLayerSpec of one key",
                )
