"""What two sides of a comparison ran, and on what: differences that are no fault of the code under test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from .measured import MeasuredRun

LONGEST: Final = 160


def differences(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun]) -> list[str]:
    """One sentence for each thing that both sides should have in common and have not. The commit is not among them: it
    is what is compared mostly."""
    found = []
    for what, value in _COMMON:
        a, b = _all(before, value), _all(after, value)
        if a != b:
            found.append(f"{what} differ: {_short(a)} against {_short(b)}")
    return found


def commits(runs: Sequence[MeasuredRun]) -> str:
    """The commits of the runs, in short; empty where none is known."""
    return ", ".join(sorted({run.commit[:12] for run in runs if run.commit}))


def _all(runs: Sequence[MeasuredRun], value: Callable[[MeasuredRun], str]) -> str:
    return ", ".join(sorted({value(run) for run in runs}))


def _short(text: str) -> str:
    text = text or "none"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


_COMMON: Final[tuple[tuple[str, Callable[[MeasuredRun], str]], ...]] = (
    ("the hosts", lambda run: " + ".join(run.hosts)),
    ("the numbers of ranks", lambda run: str(run.ranks)),
    ("the versions", lambda run: " ".join(f"{name} {version}" for name, version in sorted(run.versions.items()))),
    ("the levels of capture", lambda run: run.level),
    ("the commands", lambda run: " ".join(run.command)),
    ("what --set turned", lambda run: " ".join(f"{key}={value}" for key, value in sorted(run.knobs.items()))),
)
