"""How a model that is not ours is divided into units: what is gathered, used and reduced together."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from megazero.errors import ConfigError
from megazero.sharding import ShardSpec, whole
from megazero.zero.blocks import Unit
from megazero.zero.homes import EXTERNAL


def foreign_units(model: nn.Module) -> list[Unit]:
    """Every parameter of ``model`` in one unit, in the order of registration.

    Each child of a list of alike modules (transformer layers, residual blocks) is a unit. What lies outside such lists
    is divided by the largest modules that hold none, and where a module holds some, its own parameters are a unit. A
    parameter that several modules share, or that is registered as external to one, is in the first one's unit, and the
    others use that unit too. Modules without a forward (lists of modules, of parameters) are never called: what they
    hold is their parent's to use.
    """
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        if not _is_called(module) and module is not model:
            continue
        for parameter in (*_used_by(module), *module.__dict__.get(EXTERNAL, ())):
            owners.setdefault(parameter, []).append(module)
    taken: set[nn.Parameter] = set()
    units = []
    for name, module, recurse in _division(model, ""):
        used = module.parameters() if recurse else _used_by(module)
        parameters = [p for p in dict.fromkeys(used) if p not in taken]
        if not parameters:
            continue
        taken.update(parameters)
        inside = set(module.modules()) if recurse else {module}
        others = {owner: None for p in parameters for owner in owners[p] if owner not in inside}
        specs: dict[str, ShardSpec] = {name_of[p]: whole(name_of[p], tuple(p.shape)) for p in parameters}
        units.append(Unit(name or type(module).__name__, specs, (module, *others)))
    assert len(taken) == len(name_of)
    _check_compiled(model, units)
    return units


def _check_compiled(model: nn.Module, units: list[Unit]) -> None:
    """ConfigError where torch.compile has a unit's module inside: its hooks would be compiled too."""
    used = {module for unit in units for module in unit.modules}
    for name, module in model.named_modules():
        inside: set[nn.Module | None] = set()
        if hasattr(module, "_torchdynamo_orig_callable"):  # torch.compile(module)
            inside = set(module.modules()) - {module, module._orig_mod}
        elif module._compiled_call_impl is not None:  # module.compile()
            inside = set(module.modules())
        if not inside.isdisjoint(used):
            raise ConfigError.single(
                "model",
                f"{name or type(module).__name__} is compiled, with parts that are to be gathered one by one; give "
                "it uncompiled and call engine.compile() afterwards, or put torch.compile(layer) in place of each "
                "layer",
            )


def _division(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, bool]]:
    """(name, module, whether with all below it)"""
    if name and _is_called(module) and not any(_is_list_of_alike(inner) for inner in module.modules()):
        yield name, module, True
        return
    if _is_called(module) or not name:
        yield name, module, False
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if _is_list_of_alike(module) and _is_called(child):
            yield path, child, True
        else:
            yield from _division(child, path)


def _is_called(module: nn.Module) -> bool:
    # torch.compile gives its wrapper a forward of its own.
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _used_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a module's own, and of what is below it and never called."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not _is_called(child):
            yield from _used_by(child)


def _is_list_of_alike(module: nn.Module) -> bool:
    """Two children or more of one class, all with parameters."""
    if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return False
    children = list(module.children())
    alike = len({type(child) for child in children}) == 1
    return len(children) > 1 and alike and all(any(True for _ in child.parameters()) for child in children)
