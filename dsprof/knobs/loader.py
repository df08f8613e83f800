"""Knobs of the DataLoader."""

from __future__ import annotations

from typing import Final

from .knob import DIFFERS, SAME, Knob, Number, TrueOrFalse, of_fact

_LOADER: Final = "DataLoader"

KNOBS: Final = (
    Knob(
        "loader.num_workers",
        "how many processes load; random numbers of a data set differ, and an IterableDataset that has none gets none",
        Number(0, 1024, whole=True),
        DIFFERS,
        _LOADER,
        unit="processes",
        states=of_fact("dataloader", "num_workers"),
    ),
    Knob(
        "loader.prefetch_factor",
        "how many batches each worker loads ahead",
        Number(1, whole=True),
        SAME,
        _LOADER,
        unit="batches",
        states=of_fact("dataloader", "prefetch_factor"),
    ),
    Knob(
        "loader.pin_memory",
        "batches are copied to pinned memory, from which devices copy beside computing",
        TrueOrFalse(),
        SAME,
        _LOADER,
        states=of_fact("dataloader", "pin_memory"),
    ),
    Knob(
        "loader.persistent_workers",
        "workers stay from epoch to epoch",
        TrueOrFalse(),
        SAME,
        _LOADER,
        states=of_fact("dataloader", "persistent_workers"),
    ),
)
