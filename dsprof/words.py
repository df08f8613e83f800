"""Names that people write: which of those there are a pattern means, which one somebody may have meant, and how they
are listed. Standard library only, as `schema` is."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from difflib import SequenceMatcher
from typing import Final

SIMILAR_ABOVE: Final = 0.6
"""How similar to a word another must be to be worth naming: below that, a few letters are the same."""


def nearest(
    word: str, words: Iterable[str], above: float = SIMILAR_ABOVE, meanings: Mapping[str, str] | None = None
) -> str | None:
    """The one of `words` that means what `word` does, or is most like it, among equals the first; None if none is.
    `meanings` has words, in lower case, and what they mean, however unlike."""
    listed = list(words)
    meant = (meanings or {}).get(word.lower())
    if meant in listed:
        return meant
    found = max(listed, key=lambda other: similarity(word, other), default=None)
    return None if found is None or similarity(word, found) < above else found


def similarity(one: str, other: str) -> float:
    """From 0, nothing in common, to 1, the same but for the case."""
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()


def did_you_mean(
    word: object,
    words: Iterable[str],
    above: float = SIMILAR_ABOVE,
    meanings: Mapping[str, str] | None = None,
    otherwise: str = "",
    show: Callable[[str], str] = repr,
) -> str:
    """`; did you mean 'lr'?`, to come after what is wrong with the word; `otherwise` if none is like it. `show`: how
    the other is written, such as `str` where it is typed without quotes."""
    near = nearest(str(word), words, above, meanings)
    return otherwise if near is None else f"; did you mean {show(near)}?"


def fits(name: str, pattern: str) -> bool:
    """Whether `name` is one that `pattern` means: part by part between dots, `*` stands for any text in one of them."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def joined(*names: object) -> str:
    """`zero_optimization` and `stage` as `zero_optimization.stage`, leaving out what is empty."""
    return ".".join(str(name) for name in names if name != "")


def either(words: Iterable[object]) -> str:
    """`1, 2 or 4`."""
    *others, last = map(str, words)
    return f"{', '.join(others)} or {last}" if others else last
