"""Which process is what in a pipeline, by the names that DeepSpeed's and Megatron's users ask for."""

from __future__ import annotations

import torch.distributed as dist

from megazero.layout import Axis
from megazero.topology import Topology


class PipelineGrid:
    """``engine.grid`` and ``engine.mpu``. No layer is cut, so a model-parallel group is one process."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self.global_rank, self.world_size = topology.rank, topology.layout.world_size
        self.stage_id, self.data_parallel_id = topology.coordinates["pp"], topology.coordinates["dp"]
        self.pipe_parallel_size, self.data_parallel_size = topology.layout.pp, topology.layout.dp
        self.model_parallel_size = self.slice_parallel_size = 1
        self._alone: dist.ProcessGroup | None = None

    def get_global_rank(self) -> int:
        return self.global_rank

    def get_stage_id(self) -> int:
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        return self.data_parallel_id

    def stage_to_global(self, stage_id: int) -> int:
        """The rank of another stage of this process's pipeline."""
        return self._topology.layout.along(self.global_rank, "pp")[stage_id]

    def get_pipe_parallel_rank(self) -> int:
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> dist.ProcessGroup | None:
        return self._group("pp")

    def get_data_parallel_rank(self) -> int:
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        return self.data_parallel_size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._group("dp")

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._group("tp")

    get_slice_parallel_rank = get_model_parallel_rank
    get_slice_parallel_world_size = get_model_parallel_world_size
    get_slice_parallel_group = get_model_parallel_group

    def _group(self, axis: Axis) -> dist.ProcessGroup | None:
        """None where there is no process group at all. A group of one process is made when it is first asked for."""
        found = self._topology.group(axis)
        if found is None and dist.is_initialized():
            if self._alone is None:
                self._alone = dist.new_group([self.global_rank], use_local_synchronization=True)
            return self._alone
        return found
