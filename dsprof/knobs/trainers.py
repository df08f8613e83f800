"""Knobs of trainers: any argument of theirs, by its own name."""

from __future__ import annotations

from typing import Final

from .knob import DIFFERS, Json, Knob

KNOBS: Final = (
    Knob(
        "trainer.*",
        "a field of transformers.TrainingArguments, such as trainer.dataloader_num_workers",
        Json(),
        DIFFERS,
        "TrainingArguments",
    ),
    Knob(
        "accelerate.*",
        "an argument of accelerate.Accelerator, such as accelerate.gradient_accumulation_steps",
        Json(),
        DIFFERS,
        "Accelerator",
    ),
    Knob(
        "lightning.*",
        "an argument of lightning's Trainer, such as lightning.accumulate_grad_batches",
        Json(),
        DIFFERS,
        "Lightning's Trainer",
    ),
)
