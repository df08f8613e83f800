"""What DeepSpeed's PipelineModule has and this one has not, and what to write instead; plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_CHECKPOINTS: Final = (
    "engine.save_checkpoint(folder) writes the layers of all stages under their names in the whole model, and "
    "engine.load_checkpoint(folder) reads them, however they are divided"
)
_TIED: Final = "train_batch sums the gradients of layers of one TiedLayerSpec key: leave it out"

UNSUPPORTED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("ckpt_layer_path", "ckpt_layer_path_list", "ckpt_prefix", "load_state_dir", "save_state_dict"), _CHECKPOINTS
    ),
    **dict.fromkeys(
        ("allreduce_tied_weight_gradients", "get_tied_weights_and_groups", "tied_comms", "tied_weight_attrs"), _TIED
    ),
    "fwd_map": "module.forward_funcs has the layers that are here, module.stage_owner(n) says who has layer n",
    "get_additional_losses": "add it to what loss_fn returns, or mark it with dsprof.mark(name, value=...)",
}
"""Name -> what to write in its place."""
