"""What the papers say of schedules whose stages all take the same time: what plans and their simulation are held to.

Sources: GPipe, arXiv 1811.06965; 1F1B and interleaved 1F1B, Narayanan et al. 2021, arXiv 2104.04473, section 2.2;
ZB-H1, Qi et al. 2023, arXiv 2401.10241, section 2.3. With p ranks, m micro-batches, v stages a rank.
"""

from __future__ import annotations

from collections.abc import Sequence


def bubble_time(
    schedule: str,
    ranks: int,
    microbatches: int,
    forward: float,
    backward: float,
    weight: float = 0.0,
    virtual_stages: int = 1,
) -> float:
    """How long each rank is idle in a step without lags.

    `forward`, `backward` and `weight` are what F, B and W of one stage and micro-batch take; where the schedule does
    not split the backward, it takes `backward` + `weight`.

    - gpipe, 1f1b, interleaved: (p-1)(F+B+W) for any F, B, W; with v > 1, for m a multiple of p.
    - zero-bubble: (p-1)(F+B-W) for m >= p and W no longer than F and B. Beyond that the paper gives nothing; what is
      given here, (p-1)(F+B) - (min(m,p)-1) min(F,B,W), agrees with simulation.

    Raises ValueError for what there is no formula for.
    """
    _check(schedule, ranks, microbatches, virtual_stages)
    if schedule == "zero-bubble":
        return (ranks - 1) * (forward + backward) - (min(microbatches, ranks) - 1) * min(forward, backward, weight)
    return (ranks - 1) * (forward + backward + weight)


def bubble_fraction(
    schedule: str,
    ranks: int,
    microbatches: int,
    forward: float,
    backward: float,
    weight: float = 0.0,
    virtual_stages: int = 1,
) -> float:
    """`bubble_time` as a part of the step: without split backward, (p-1) / (vm+p-1) whatever F and B take."""
    idle = bubble_time(schedule, ranks, microbatches, forward, backward, weight, virtual_stages)
    return idle / (idle + virtual_stages * microbatches * (forward + backward + weight))


def gpipe_makespan(forward: Sequence[float], backward: Sequence[float], microbatches: int) -> float:
    """What a step of GPipe takes with stages that take different times, one F and one B each, in the given unit."""
    more = microbatches - 1
    return sum(forward) + more * max(forward) + sum(backward) + more * max(backward)


def peak_activations(schedule: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> list[int]:
    """A rank, the most activations (of one stage and one micro-batch) between their F and their B.

    - gpipe: m
    - 1f1b, zero-bubble: p-r on rank r, at most m
    - interleaved: (v-1)p + 2(p-r-1) + 1 on rank r, at most vm; for m a multiple of p

    Raises ValueError for what there is no formula for.
    """
    _check(schedule, ranks, microbatches, virtual_stages)
    if schedule == "gpipe":
        return [microbatches] * ranks
    if virtual_stages == 1:
        return [min(ranks - rank, microbatches) for rank in range(ranks)]
    most = virtual_stages * microbatches
    return [min((virtual_stages - 1) * ranks + 2 * (ranks - rank - 1) + 1, most) for rank in range(ranks)]


def _check(schedule: str, ranks: int, microbatches: int, virtual_stages: int) -> None:
    if schedule not in ("gpipe", "1f1b", "interleaved", "zero-bubble"):
        raise ValueError(f'nothing is published here of a schedule "{schedule}"; simulate it')
    if virtual_stages > 1 and (schedule != "interleaved" or microbatches % ranks):
        raise ValueError(
            f"the formulas with {virtual_stages} virtual stages are those of interleaved, for a multiple of {ranks} "
            f"micro-batches; simulate {schedule} with {microbatches}"
        )
