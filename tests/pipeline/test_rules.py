"""Which settings of the pipeline go together: the rules, and what they tell the user."""

from __future__ import annotations

import re

import pytest

from megazero.config import Config
from megazero.errors import ConfigError


def config(**parallel: object) -> Config:
    return Config.from_dict({"model": {"num_layers": 12}, "parallel": parallel})


@pytest.mark.parametrize(
    ("parallel", "field", "told"),
    [
        ({"virtual_pp": 2}, "parallel.virtual_pp", "parallel.pp = 1"),
        ({"pp": 2, "virtual_pp": 2, "schedule": "gpipe"}, "parallel.schedule", "parallel.virtual_pp = 2; use interl"),
        ({"pp": 2, "schedule": "interleaved"}, "parallel.schedule", "parallel.virtual_pp above 1"),
        ({"pp": 4, "virtual_pp": 4}, "parallel.virtual_pp", "4 x 4 = 16 stages are more than model.num_layers = 12"),
        ({"pp": 4, "virtual_pp": 4}, "parallel.virtual_pp", "use at most 3"),
        ({"pp": 2, "virtual_pp": 2, "partition": (6, 6)}, "parallel.partition", "2 x 2 = 4; give one number of layers"),
        ({"pp": 2, "virtual_pp": 0}, "parallel.virtual_pp", "at least 1"),
        ({"pp": 2, "virtual_pp": 2, "schedule": "zero_bubble"}, "parallel.schedule", "zero_bubble has one stage per"),
    ],
)
def test_settings_that_contradict_each_other(parallel: dict[str, object], field: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**parallel)
    assert f"{field}: " in str(error.value) and told in str(error.value)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"train": {"recompute": "full"}}, "train.recompute = full is not to keep; use 1f1b, or train.recompute none"),
        ({"train": {"recompute": "selective"}}, "train.recompute = selective"),
        ({"zero": {"stage": 2}}, "zero.stage = 2 is not to hold; use 1f1b, or zero.stage 1"),
        ({"zero": {"stage": 3}}, "zero.stage = 3"),
    ],
)
def test_what_zero_bubble_does_not_go_with(sections: dict[str, dict[str, object]], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        Config.from_dict({"parallel": {"pp": 2, "schedule": "zero_bubble"}, **sections})


def test_1f1b_of_several_stages_per_rank_is_interleaved() -> None:
    assert config(pp=2).schedule == "1f1b"
    assert config(pp=2, virtual_pp=2).schedule == "interleaved"
    assert config(pp=2, virtual_pp=2, schedule="interleaved").schedule == "interleaved"
    assert config(pp=2, schedule="gpipe").schedule == "gpipe"
