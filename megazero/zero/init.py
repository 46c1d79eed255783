"""Building a model whose weights are never whole on one rank: `with megazero.zero.Init():`.

[Note: when a parameter is cut]
A module registers a parameter before it fills it. So the parameters of the two modules that were last built, or last
touched, stay whole, and are cut, with the first rank's values, when a third one's turn comes. A cut parameter that is
touched again while the model is being built (initialisation by the model as a whole, tying, loading) is made whole
again and waits for its next cut. Every rank draws what one process would, and all do the same things in the same order.
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from megazero.ds_config import read_ds_config
from megazero.errors import ConfigError
from megazero.foreign.start import TIMEOUT, start_topology
from megazero.zero.groups import data_parallel
from megazero.zero.homes import home_of, settle
from megazero.zero.slices import Pending, Slice

_WHOLE_MODULES = 2
_SEQUENTIAL_LOAD = "HF_DEACTIVATE_ASYNC_LOAD"  # transformers otherwise reads ahead as fast as it can


class Init:
    """Modules built inside keep a slice of their parameters on each rank, the first rank's values.

    Args:
        config_dict_or_path, config: a ds_config, which is checked; two names for one thing.
        dtype: what floating-point parameters are rounded to in the end; unset: as the modules make them. The float32
            masters of `megazero.initialize` start from these values, so leave it unset to have them in full.
        enabled: false: do nothing.

    `from_pretrained` of transformers works inside. Afterwards `GatheredParameters` gives whole values, and
    `megazero.initialize` takes the model. Parameters of a class of their own stay whole. A tensor taken of a parameter
    (`.data`, a slice) is the parameter's until those of two other modules have been used.
    """

    def __init__(
        self,
        config_dict_or_path: Mapping[str, Any] | str | Path | None = None,
        *,
        config: Mapping[str, Any] | str | Path | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
    ) -> None:
        self.enabled, self.dtype, self.building = enabled, dtype, False
        if not enabled:
            return
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ConfigError.single("dtype", f"is {dtype!r}; give a dtype of torch's, such as torch.bfloat16")
        topology = start_topology()
        given = config_dict_or_path if config_dict_or_path is not None else config
        if given is not None:
            read_ds_config(given, topology.layout.dp)
        groups = data_parallel(topology, 0, 1, TIMEOUT)
        self._group, self._agreement, self._device = groups.whole, groups.agreement, topology.device
        self._whole: OrderedDict[nn.Module | None, list[nn.Parameter]] = OrderedDict()
        self._module_of = WeakIdKeyDictionary()

    def __enter__(self) -> Init:
        if self.enabled:
            self.building = True
            self._handle = register_module_parameter_registration_hook(self._registered)
            self._load_setting = os.environ.get(_SEQUENTIAL_LOAD)
            os.environ[_SEQUENTIAL_LOAD] = "1"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.enabled:
            return
        self._handle.remove()
        os.environ.pop(_SEQUENTIAL_LOAD)
        if self._load_setting is not None:
            os.environ[_SEQUENTIAL_LOAD] = self._load_setting
        if kind is None:
            self._cut_all_but(0)
            self._cast()
        self._whole.clear()
        self.building = False

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if type(parameter) is not nn.Parameter or parameter.is_meta or home_of(parameter) is not None:
            return
        self._module_of[parameter] = weakref.ref(module)
        self._keep_whole(parameter)
        self._cut_all_but(_WHOLE_MODULES)

    def _keep_whole(self, parameter: nn.Parameter) -> None:
        module = self._module_of[parameter]()
        settle(parameter, Pending(self))
        self._whole.setdefault(module, []).append(parameter)
        self._whole.move_to_end(module)

    def _cast(self) -> None:
        # Only now: initialisation drawn in 16 bits would be another one.
        for parameter in list(self._module_of) if self.dtype is not None else ():
            home = home_of(parameter)
            if isinstance(home, Slice) and home.builder is self and home.values.is_floating_point():
                home.cast(parameter, self.dtype)

    def make_whole(self, parameters: Sequence[nn.Parameter]) -> None:
        """Cut parameters are used: they are whole until others' turn comes."""
        if self._agreement is not None:
            self._agreement.on(f"a weight of shape {tuple(parameters[0].shape)} while building")
        self._cut_all_but(_WHOLE_MODULES - 1)
        for parameter in dict.fromkeys(parameters):
            home_of(parameter).show(parameter)
            self._keep_whole(parameter)

    def cut(self, parameter: nn.Parameter) -> Slice:
        """Cut a parameter that waits for it, now."""
        for waiting in self._whole.values():
            waiting[:] = [other for other in waiting if other is not parameter]
        return Slice(parameter, self._group, self._device, self)

    def _cut_all_but(self, count: int) -> None:
        while len(self._whole) > count:
            _, parameters = self._whole.popitem(last=False)
            for parameter in parameters:
                # An engine that was made in here may have taken it.
                if isinstance(home_of(parameter), Pending):
                    Slice(parameter, self._group, self._device, self)
