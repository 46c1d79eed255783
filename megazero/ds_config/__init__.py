"""ds_config.json, DeepSpeed's settings, read into one typed tree; and the learning rate schedules that it names.

config = read_ds_config("ds_config.json", world_size=8, trainer_values={"optimizer.params.lr": 1e-4})
config.zero.stage, config.gradient_accumulation_steps, config.not_needed
optimizer = make_optimizer(config.optimizer, parameters)
scheduler = make_scheduler(config.scheduler, optimizer)
"""

from __future__ import annotations

from megazero.ds_config.optimizers import is_elementwise, make_optimizer
from megazero.ds_config.reader import read_ds_config
from megazero.ds_config.schedulers import make_scheduler
from megazero.ds_config.tree import DsConfig

__all__ = ["DsConfig", "is_elementwise", "make_optimizer", "make_scheduler", "read_ds_config"]
