"""How a model that is not ours is divided into units: what is gathered, used and reduced together."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from megazero.sharding import ShardSpec, whole
from megazero.zero.blocks import Unit


def foreign_units(model: nn.Module) -> list[Unit]:
    """Every parameter of ``model`` in one unit, in the order of registration.

    Each child of a list of alike modules (transformer layers, residual blocks) is a unit. What lies outside such lists
    is divided by the largest modules that hold none, and where a module holds some, its own parameters are a unit. A
    parameter that several modules share is in the first one's unit, and the others use that unit too.
    """
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    taken: set[nn.Parameter] = set()
    units = []
    for name, module, recurse in _division(model, ""):
        parameters = [p for p in module.parameters(recurse=recurse) if p not in taken]
        if not parameters:
            continue
        taken.update(parameters)
        inside = set(module.modules()) if recurse else {module}
        others = {owner: None for p in parameters for owner in owners[p] if owner not in inside}
        specs: dict[str, ShardSpec] = {name_of[p]: whole(name_of[p], tuple(p.shape)) for p in parameters}
        units.append(Unit(name or type(module).__name__, specs, (module, *others)))
    assert len(taken) == len(name_of)
    return units


def _division(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, bool]]:
    """(name, module, whether with all below it)"""
    if name and not any(_is_list_of_alike(inner) for inner in module.modules()):
        yield name, module, True
        return
    yield name, module, False
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if _is_list_of_alike(module):
            yield path, child, True
        else:
            yield from _division(child, path)


def _is_list_of_alike(module: nn.Module) -> bool:
    """Two children or more of one class, all with parameters."""
    if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return False
    children = list(module.children())
    alike = len({type(child) for child in children}) == 1
    return len(children) > 1 and alike and all(any(True for _ in child.parameters()) for child in children)
