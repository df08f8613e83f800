"""`activation_checkpointing` and `checkpoint`: what is recomputed instead of kept, and what is written to disk."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from .model import Section, Whole


class ActivationCheckpointingConfig(Section):
    """Activations computed again in the backward pass instead of being kept. DeepSpeed leaves it to the model to call
    `checkpointing.checkpoint`, which works here too; `policy` applies it to a model that does not."""

    cpu_checkpointing: bool = False
    """Keep what recomputation begins with, the checkpoints themselves, in host memory."""

    policy: Literal["none", "full", "every_k", "selective"] = "none"
    """dsprof's own. What the engine wraps by itself: `none`; `full`, every block; `every_k`, one block in `every`;
    `selective`, all but the results that cost most to compute, such as those of matrix products and attention."""

    every: Whole = Field(default=2, ge=1)
    """dsprof's own. With `every_k`: one block in so many is recomputed."""

    blocks: tuple[str, ...] | None = None
    """dsprof's own. Names of the blocks that `policy` is about, with `*` for any text, as `layers.*`. Default: the
    largest list of modules of one kind in the model."""


class CheckpointConfig(Section):
    """How `save_checkpoint` and `load_checkpoint` behave."""

    tag_validation: Annotated[
        Literal["Ignore", "Warn", "Fail"],
        BeforeValidator(lambda value: value.capitalize() if isinstance(value, str) else value),
    ] = "Warn"
    """Whether all ranks gave `save_checkpoint` the same tag: do not look, warn, or fail. In upper or lower case."""
