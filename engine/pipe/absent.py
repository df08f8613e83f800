"""What DeepSpeed's PipelineModule and PipelineEngine have and these have not, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from torch import nn

_CHECKPOINTS: Final = (
    "engine.save_checkpoint(folder) writes the layers of all stages under their names in the whole model, and "
    "engine.load_checkpoint(folder) reads them, however they are divided"
)
_TIED: Final = "train_batch sums the gradients of layers of one TiedLayerSpec key: leave it out"
_LOSSES: Final = "add it to what loss_fn returns, or mark it with dsprof.mark(name, value=...)"
_PLAN: Final = "engine.plan.actions has what each rank does in a step, in order"
_TIMES: Final = 'write "wall_clock_breakdown": true in the configuration, or train under dsprof run'
_PRINT: Final = "print where engine.stage_id and engine.grid.get_data_parallel_id() are those you want"

ABSENT: Final[Mapping[str, str]] = {
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
    "tput_timer": _TIMES,
}
"""Name -> what to write in its place."""


class TellsAbsent(nn.Module):
    """Says what to write instead of what DeepSpeed's class has and neither this one nor those after it have."""

    told_as: ClassVar[str]
    """DeepSpeed's name of the class."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in ABSENT:
                raise
        raise AttributeError(f"{self.told_as}.{name}: dsprof's engine does not have it: {ABSENT[name]}")
