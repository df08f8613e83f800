"""One colour and one name for each part of the step and each kind of time, the same in every report.

The colours were chosen so that any two stay apart (CIE76 difference of at least 20) with normal sight and
with simulated protanopia, deuteranopia and tritanopia (Machado et al., 2009), on light and on dark paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Part:
    """How a budget part or a kind of time is shown."""

    label: str
    color: str
    ink: str
    """Colour of text on top of `color`."""
    meaning: str


WHITE: Final = "#FFFFFF"
BLACK: Final = "#14171A"

PARTS: Final = {
    "compute": Part("compute", "#2F86EE", BLACK, "forward, loss, backward"),
    "comm_exposed": Part("exposed comm", "#E0914A", BLACK, "standing still while bytes move"),
    "peer_wait": Part("peer wait", "#B5121B", WHITE, "standing still until the last rank arrives"),
    "bubble": Part("bubble", "#A01C8C", WHITE, "standing still for another stage of the pipeline"),
    "data": Part("data", "#1F7C59", WHITE, "waiting for the next batch"),
    "optimizer": Part("optimizer", "#45C8F5", BLACK, "gradient clipping and the optimizer step"),
    "offload": Part("offload", "#DCCB1E", BLACK, "copies to and from the CPU or NVMe"),
    "pause": Part("pause", "#7A2CEB", WHITE, "garbage collection"),
    "other": Part("other", "#ADADAD", BLACK, "outside the phases of the loop"),
}

TIMES: Final = {
    "training": Part("training", "#2F86EE", BLACK, "training steps"),
    "evaluation": Part("evaluation", "#A01C8C", WHITE, "forwards without gradients, between training steps"),
    "checkpointing": Part("checkpointing", "#DCCB1E", BLACK, "saving checkpoints"),
    "compilation": Part("compilation", "#8C5A2B", WHITE, "torch.compile's own work"),
    "startup": Part("start-up", "#45C8F5", BLACK, "from the start of the process to the first step"),
    "rest": Part("rest", "#ADADAD", BLACK, "between the last step and the end, and what is none of the above"),
}
"""Kinds of the run's wall time, in the order of schema.TIME_KINDS."""


MEMORY: Final = {
    "parameters": Part("parameters", "#2F86EE", BLACK, "of models, where they lie on this rank"),
    "gradients": Part("gradients", "#E0914A", BLACK, "of parameters"),
    "optimizer_states": Part("optimizer states", "#45C8F5", BLACK, "moments, and copies in a wider format"),
    "buffers": Part("buffers", "#DCCB1E", BLACK, "of models"),
    "activations": Part("activations", "#A01C8C", WHITE, "what is kept for backward, when that began"),
    "rest": Part("rest", "#ADADAD", BLACK, "what else was in use: temporary tensors; on the host libraries, too"),
    "cached": Part("cached", "#7A2CEB", WHITE, "held by the allocator, and not in use"),
}
"""What memory is for (schema.MEMORY_PARTS), and what remains."""


SEGMENTS: Final = {
    "allocated": Part("in use", "#2F86EE", BLACK, "blocks of tensors"),
    "pending": Part("freed, another stream may still use it", "#DCCB1E", BLACK, "blocks that wait for a stream"),
    "split": Part("free between blocks in use", "#B5121B", WHITE, "cannot go back to the device"),
    "releasable": Part("free in whole segments", "#ADADAD", BLACK, "can go back to the device"),
}
"""What the bytes of an allocator's segments are (`analyzer.memory.STATE_COLUMNS`)."""


@dataclass(frozen=True)
class Mark:
    """How a step that is not ordinary is marked."""

    label: str
    color: str
    symbol: str
    """As plotly names it."""


IRREGULAR: Final = {
    "evaluation": Mark("evaluation", TIMES["evaluation"].color, "diamond"),
    "checkpointing": Mark("checkpointing", TIMES["checkpointing"].color, "square"),
    "compilation": Mark("compilation", TIMES["compilation"].color, "triangle-up"),
    "data": Mark("input", PARTS["data"].color, "circle"),
    "stop": Mark("stop", PARTS["pause"].color, "x"),
}
"""What makes a step irregular (`Analysis.irregular`, column `kind`)."""

SERIES: Final = ("#2F86EE", "#E0914A", "#1F7C59", "#A01C8C", "#45C8F5", "#DCCB1E", "#7A2CEB", "#B5121B")
"""Colours for what is no budget part: ranks, operators."""

PROFILED: Final = "#7A2CEB"
"""Behind steps that torch.profiler looked at."""
HIGHLIGHT: Final = "#B5121B"
NEUTRAL: Final = "#8A9099"


def mark(kind: str) -> Mark:
    """How steps of a kind are marked; one this version does not know is a grey star under its own name."""
    return IRREGULAR.get(kind) or Mark(kind.replace("_", " "), NEUTRAL, "star")


def part(name: str) -> Part:
    """How `name` is shown; a part this version does not know is shown in grey under its own name."""
    return PARTS.get(name) or Part(name.replace("_", " "), NEUTRAL, BLACK, "")
