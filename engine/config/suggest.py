"""What somebody may have meant by a word that is not among those there are."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Final

ALIKE_ABOVE: Final = 0.6
"""How like a word another must be to be worth naming: below that, the likeness is of a few letters."""

ALIASES: Final = {
    "decay": "weight_decay",
    "epsilon": "eps",
    "grad_accum_steps": "gradient_accumulation_steps",
    "grad_clip": "gradient_clipping",
    "learning_rate": "lr",
    "l2": "weight_decay",
    "max_grad_norm": "gradient_clipping",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "wd": "weight_decay",
    "weightdecay": "weight_decay",
}
"""Word, in lower case -> the key of that meaning, however unlike."""


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The one of `words` that means what `word` does, or is most like it, among equals the first; None if none is."""
    listed = list(words)
    meant = ALIASES.get(word.lower())
    if meant in listed:
        return meant
    found = max(listed, key=lambda other: likeness(word, other), default=None)
    return None if found is None or likeness(word, found) < ALIKE_ABOVE else found


def likeness(one: str, other: str) -> float:
    """From 0, nothing in common, to 1, the same but for the case."""
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()
