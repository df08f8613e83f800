"""The mark `plants`: a test that says that it plants the cause of a finding has it found."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def planted(codes: Collection[str]) -> Iterator[None]:
    """Fails unless findings of all these codes are made meanwhile."""
    from dsprof.analyzer import judge

    found: set[str] = set()
    run = judge._Judging.run

    def noted(judging: judge._Judging) -> judge.Judged:
        judgement = run(judging)
        found.update(finding.code for finding in judgement.findings)
        return judgement

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge._Judging, "run", noted)
        yield
    missing = sorted({*codes} - found)
    if missing:
        pytest.fail(f"planted and not found: {', '.join(missing)}")
