"""DualPipeV, in which each rank has two stages: one on the way down the ranks and one on the way back up."""

from __future__ import annotations

from collections import Counter, deque

from .plan import Action, Plan

DUAL_PIPE_V = "dualpipe-v"


def dual_pipe_v(ranks: int, microbatches: int) -> Plan:
    """DualPipeV (DeepSeek 2025, github.com/deepseek-ai/DualPipe), as `torch.distributed.pipelining` runs it.

    The first rank has the first and the last stage, so it can begin backwards as soon as a micro-batch is back; what is
    forward on one stage of a rank alternates with what is backward on its other. Some backwards are in two parts, where
    another rank waits for the first or the second fills a gap; the others are whole.

    Raises ValueError for fewer micro-batches than stages.
    """
    if ranks < 1 or microbatches < 2 * ranks:
        raise ValueError(
            f"{microbatches} micro-batches on {ranks} ranks: DualPipeV takes at least as many as it has stages, two a "
            f"rank; write {2 * max(ranks, 1)} or more"
        )
    actions = tuple(_Rank(rank, ranks).all_of(microbatches) for rank in range(ranks))
    return Plan(DUAL_PIPE_V, ranks, microbatches, 2, actions, v_shaped=True)


class _Rank:
    """What one rank does, put down in order."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._down, self._up = rank, 2 * ranks - 1 - rank
        self._actions: list[Action] = []
        self._next: Counter[tuple[str, int]] = Counter()
        self._weights: deque[Action] = deque()
        """W of what has been divided so far."""

    def all_of(self, microbatches: int) -> tuple[Action, ...]:
        rank, after = self._rank, self._ranks - self._rank - 1
        down, up = self._down, self._up
        # The pipeline fills.
        for _ in range(2 * after):
            self._do("F", down)
        for _ in range(rank + 1):
            self._do("F", down)
            self._do("F", up)
        for _ in range(after):
            self._do("B", up, divided=True)
            self._weight()
            self._do("F", up)
        # A forward of one stage beside a backward of the other.
        for _ in range(microbatches - 2 * self._ranks + rank + 1):
            self._do("F", down)
            self._do("B", up)
            self._do("F", up)
            self._do("B", down)
        # It drains.
        for _ in range(after):
            self._do("B", up)
            self._do("F", up)
            self._do("B", down)
        for number in range(2 * (rank + 1)):
            # From the middle on: the others wait for input gradients alone.
            self._do("B", down if number % 2 else up, divided=number > rank)
        for _ in range(after):
            self._weight()
            self._do("B", down, divided=True)
        while self._weights:
            self._weight()
        return tuple(self._actions)

    def _do(self, op: str, stage: int, divided: bool = False) -> None:
        action = Action(op, stage, self._next[op, stage])
        self._next[op, stage] += 1
        self._actions.append(action)
        if divided:
            self._weights.append(action._replace(op="W"))

    def _weight(self) -> None:
        if self._weights:
            self._actions.append(self._weights.popleft())
