"""Where dsprof's own words end on `dsprof run`'s command line, and the job's begin."""

from __future__ import annotations

from collections.abc import Mapping

MODULE_FLAGS = ("-m", "--module")


def split_at_job(words: list[str], takes_value: Mapping[str, bool]) -> int:
    """Index of the first word of the job: a script, `-m`, `--`, or any other word that is no flag.

    `takes_value` says of each flag, dashes within, whether a value follows. At an unknown flag the search ends at
    the end of the line: the parser will refuse it. What belongs to the job is never looked at.
    """
    index = 0
    while index < len(words):
        word = words[index]
        if word == "--" or word in MODULE_FLAGS or not word.startswith("-") or word == "-":
            return index
        if word.startswith("--"):
            name, has_value, _ = word.partition("=")
            wants = takes_value.get(dashed(name))
            if wants is None:
                return len(words)
            index += 2 if wants and not has_value else 1
            continue
        for place, letter in enumerate(word[1:], start=2):  # -q, -oDIR, -qo DIR
            if letter == "m" and place == 2:
                return index  # -mpkg.train
            wants = takes_value.get(f"-{letter}")
            if wants is None:
                return len(words)
            if wants:
                index += 1 if place == len(word) else 0
                break
        index += 1
    return len(words)


def dashed(name: str) -> str:
    """A flag in torchrun's second spelling, in its first: `--nproc_per_node` is `--nproc-per-node`."""
    return name.replace("_", "-")
