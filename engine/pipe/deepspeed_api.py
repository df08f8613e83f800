"""What a script asks of a pipeline by DeepSpeed's names: where things are, and what there is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch.distributed as dist
from torch import nn

from .topology import PipeDataParallelTopology, PipelineGrid, ProcessTopology

_CHECKPOINTS: Final = (
    "engine.save_checkpoint(folder) writes the layers of all stages under their names in the whole model, and "
    "engine.load_checkpoint(folder) reads them, however they are divided"
)
_TIED: Final = "train_batch sums the gradients of layers of one TiedLayerSpec key: leave it out"
_LOSSES: Final = "add it to what loss_fn returns, or mark it with dsprof.mark(name, value=...)"
_PLAN: Final = "engine.plan.actions has what each rank does in a step, in order"
_TIMES: Final = 'write "wall_clock_breakdown": true in the configuration, or train under dsprof run'
_PRINT: Final = "print where engine.stage_id and engine.grid.get_data_parallel_id() are those you want"

UNSUPPORTED: Final[Mapping[str, str]] = {
    "agg_additional_losses": _LOSSES,
    "allreduce_tied_weight_gradients": _TIED,
    "batch_timer": _TIMES,
    "ckpt_layer_path": _CHECKPOINTS,
    "ckpt_layer_path_list": _CHECKPOINTS,
    "ckpt_prefix": _CHECKPOINTS,
    "dp_group_loss": "train_batch returns the mean over all replicas, on every rank",
    "fwd_map": "module.forward_funcs has the layers that are here, module.stage_owner(n) says who has layer n",
    "get_additional_losses": _LOSSES,
    "get_tied_weights_and_groups": _TIED,
    "load_state_dir": _CHECKPOINTS,
    "log_for_device": _PRINT,
    "mem_status": "write deepspeed.runtime.utils.see_memory_usage(message, force=True)",
    "num_pipe_buffers": _PLAN,
    "pipe_buffers": _PLAN,
    "save_state_dict": _CHECKPOINTS,
    "tied_comms": _TIED,
    "tied_weight_attrs": _TIED,
    "total_additional_losses": _LOSSES,
    "total_loss": "train_batch returns the mean loss, and engine.agg_train_loss keeps it",
    "tput_log": _PRINT,
}
"""Name -> what to write in its place."""

UNKNOWN: Final = "PipelineModule: its stages are not known yet; pass num_stages, or give it to initialize first"


class ModuleNames(nn.Module):
    """The part of a PipelineModule that says where things are."""

    num_stages: int | None
    bounds: list[int]
    grid: PipelineGrid | None
    activation_checkpoint_interval: int
    _rank: int
    _topology: ProcessTopology | None

    def topology(self) -> ProcessTopology:
        """The grid of ranks by its axes: what was passed, else `pipe` and `data`, and `model` if layers are cut."""
        if self._topology is not None:
            return self._topology
        if self.grid is not None:
            return self.grid.topology()
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        stages = self.num_pipeline_stages()
        return PipeDataParallelTopology(stages, ranks // stages)

    def mpu(self) -> PipelineGrid:
        """Where this rank is. Raises RuntimeError before there is an engine, which divides the ranks."""
        if self.grid is None:
            raise RuntimeError("PipelineModule.mpu: ranks are divided by initialize; call it first, without mpu=")
        return self.grid

    def num_pipeline_stages(self) -> int:
        """Ranks of the pipeline."""
        if self.num_stages is None:
            raise RuntimeError(UNKNOWN)
        return self.num_stages

    @property
    def parts(self) -> list[int]:
        """`bounds`."""
        return self.bounds

    def partitions(self) -> list[int]:
        """`bounds`."""
        return self.bounds

    @property
    def stage_id(self) -> int:
        """This rank's place in the pipeline."""
        return self._rank

    def stage_owner(self, layer_idx: int) -> int:
        """The pipeline rank that has layer number `layer_idx`. Raises ValueError if there is no such layer."""
        layers = self.bounds[-1] if self.bounds else 0
        if not 0 <= layer_idx < layers:
            raise ValueError(f"stage_owner: there is no layer {layer_idx}; there are {layers}, from 0 on")
        stage = next(s for s in range(len(self.bounds) - 1) if layer_idx < self.bounds[s + 1])
        return stage % self.num_pipeline_stages()

    def set_checkpoint_interval(self, interval: int) -> None:
        """Layers between two activation checkpoints from now on; 0 keeps all activations."""
        if interval < 0:
            raise ValueError(f"set_checkpoint_interval: {interval}; write 0, or the number of layers between two")
        self.activation_checkpoint_interval = interval

    def is_first(self) -> bool:
        """Whether this rank has the first layers."""
        return 0 in self.stages

    def is_last(self) -> bool:
        """Whether this rank has the last layers."""
        return len(self.bounds) - 2 in self.stages

    def __getattr__(self, name: str) -> Any:
        """Says what to write instead of what DeepSpeed's PipelineModule has and this has not."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in UNSUPPORTED:
                raise
        raise AttributeError(f"PipelineModule.{name}: dsprof's engine does not have it: {UNSUPPORTED[name]}")
