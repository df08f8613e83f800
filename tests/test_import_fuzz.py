"""1,000 hostile inputs over all importers: each ends in one sentence or in a run, in bounded memory, with nothing in
them executed; and a good rank beside a hostile one is analysed."""

from __future__ import annotations

import random
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import fuzz
import pytest

from dsprof.analyzer import analyze
from dsprof.importers import import_trace
from dsprof.run import RunError

ADDRESS_SPACE = 3 << 30
"""Bytes beyond what the process has: what would take more fails."""
OF_BOTH = ("is there 2 times", "which rank is", "both of rank", ": of rank", "tells rank", "of rank 0, as")
"""Of a hostile file that says it is the good one's rank, or none that a job has, somebody must be asked."""
CANARY = Path("canary-was-run")


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + ADDRESS_SPACE, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def problem_of(folder: Path, format_name: str, seed: int) -> str:
    """What was wrong with how a hostile file of rank 1 was met, beside a good one of rank 0; empty: nothing."""
    chance = random.Random(f"{format_name} {seed}")
    fuzz.FORMATS[format_name](folder, 0, None)
    fuzz.FORMATS[format_name](folder, 1, chance)
    try:
        trace = import_trace(folder)
        analysis = analyze(trace) if seed % 4 == 0 else None
    except RunError as error:
        said = str(error)
        if "\n" in said or "\x1b" in said or len(said) > 1000:
            return f"no sentence: {said[:300]!r}"
        return "" if any(words in said for words in OF_BOTH) else f"the good rank is lost: {said[:300]}"
    except BaseException as error:
        return f"raised {type(error).__name__}: {str(error)[:300]}"
    if 0 not in trace.ranks:
        return "the good rank is not there"
    failed = [why for why in analysis.not_judged.values() if "the rule failed" in why] if analysis is not None else []
    return f"a rule failed: {failed[0]}" if failed else ""


def problems(folder: Path, seeds: range) -> list[str]:
    found = []
    for name in fuzz.FORMATS:
        for seed in seeds:
            place = folder / "traces"
            place.mkdir()
            problem = problem_of(place, name, seed)
            if problem:
                found.append(f"{name} {seed}: {problem}")
            shutil.rmtree(place)
    assert not CANARY.exists()
    return found


def export_problem(folder: Path, seed: int) -> str:
    path = fuzz.exported(random.Random(seed), folder)
    try:
        import_trace(path)
    except RunError as error:
        return "" if "\n" not in str(error) and len(str(error)) < 1000 else f"no sentence: {str(error)[:300]!r}"
    except BaseException as error:
        return f"raised {type(error).__name__}: {str(error)[:300]}"
    return ""


def test_hostile_traces_beside_a_good_rank(tmp_path: Path) -> None:
    assert problems(tmp_path, range(8)) == []


def test_damaged_exports(tmp_path: Path) -> None:
    assert [said for seed in range(6) if (said := export_problem(tmp_path, seed))] == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_hostile_traces(tmp_path: Path, part: int) -> None:
    """Fourteen of each of seven formats, and two exports, ten times."""
    assert problems(tmp_path, range(100 + 14 * part, 114 + 14 * part)) == []
    assert [said for seed in range(2 * part, 2 * part + 2) if (said := export_problem(tmp_path, 50 + seed))] == []
