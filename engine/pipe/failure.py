"""What became of a run of a plan, on all ranks of the job: they go on together or fail together.

Ranks of a pipeline notify each other when one fails. Replicas and tensor-parallel ranks wait for each other in
collectives instead, and a rank that failed does not come there. So it says why in the job's store, leaves the others
some time to end their run, and then breaks the connections: who waits fails, too, and finds the cause in the store.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..comm.comm import Comm
from ..comm.consensus import gather_objects
from ..comm.peers import Peers, is_lost
from .p2p import Link, PeerError, PipelineError

GRACE_S: Final = 5.0
"""How long a rank that failed leaves to those that may be waiting for it: half of it before they agree."""
LOST: Final = (
    "this engine's ranks have lost each other in an earlier step that failed; end the job, and start it again from a "
    "checkpoint"
)


class FailureConsensus:
    """Of one engine's runs, one after the other."""

    def __init__(self, hosts: Comm, comms: Sequence[Comm], links: Sequence[Link], peers: Peers, *, apart: bool) -> None:
        """On all ranks, which communicate by `hosts` in host memory. Of `comms` and `links` are the groups that ranks
        of the job may be waiting for this one in. `apart`: whether they may do so elsewhere than at the ends of their
        pipeline's links."""
        self._everyone = hosts
        self._comms, self._links, self._peers = comms, links, peers
        self._grace = GRACE_S / 2 if apart else None
        self._runs = 0
        self._store: Any = None
        self.over = False
        """Whether ranks have lost each other, and nothing can be run any more."""
        if hosts.group is not None:
            number = torch.tensor(secrets.randbits(48) if hosts.rank == 0 else 0)
            self._everyone.all_reduce(number, "pipeline").wait()  # nobody has looked for these keys before
            store = distributed_c10d._get_default_store()
            self._store = distributed_c10d.PrefixStore(f"dsprof/pipeline/{number.item()}", store)

    def begin(self) -> None:
        """Another run. Raises PipelineError if there cannot be one."""
        if self.over:
            raise PipelineError(LOST)
        self._runs += 1

    def deadline(self) -> float | None:
        """Until when, by `time.monotonic`, who fails now waits for others; None if they are sure to come."""
        return None if self._grace is None else time.monotonic() + self._grace

    def report(self, error: BaseException, where: str) -> None:
        """Have every rank know why the run fails, as soon as one rank does. The first cause is kept."""
        if self._store is not None and not _lost(error):
            with suppress(RuntimeError):
                text = f"rank {dist.get_rank()}: {error if isinstance(error, PipelineError) else said(error, where)}"
                self._store.compare_set(str(self._runs), "", text)

    def agree(self, failed: BaseException | None, *, begun: bool) -> tuple[BaseException | None, bool]:
        """On all ranks, at the end of a run: what is to be raised if it failed on any of them, and whether any has
        `begun` to make gradients."""
        counts = torch.tensor([failed is not None, begun], dtype=torch.float32)  # on the host, which runs ahead
        try:
            if failed is None or self._grace is None:
                self._everyone.all_reduce(counts, "pipeline").wait()
            else:
                self._sum_in_time(counts)
        except RuntimeError as error:
            failed = failed or error
            self.give_up()
        if self.over:
            return self._of_cause(failed), True
        failures, halfway = counts.tolist()
        return (self._of_cause(failed) if failures else None), halfway > 0

    def ends_alike(self, replicas: object, sent: Sequence[int], *, drained: bool) -> bool:
        """On all ranks, after a run that failed: whether nothing of it is under way (`drained`) and those that reduce
        their gradients together, whose `replicas` are equal, have sent each other equally much. Then the next run's
        communications meet their like on all ranks, and the step can begin anew."""
        try:
            said = gather_objects((repr(replicas), list(sent), drained), self._everyone)
        except RuntimeError:
            self.give_up()
            return False
        same: dict[str, list[int]] = {}
        return all(clean and same.setdefault(place, counts) == counts for place, counts, clean in said)

    def give_up(self) -> None:
        """Have all who wait for this rank fail, now or later."""
        self.over = True
        lost = PipelineError(LOST)
        for comm in (*self._comms, self._everyone):
            comm.abort(lost)
        for link in self._links:
            link.abort()

    def _sum_in_time(self, counts: torch.Tensor) -> None:
        """Raises RuntimeError if the others do not come."""
        work = dist.all_reduce(counts, group=self._everyone.group, async_op=True)
        until = self.deadline()
        while work is not None and not work.is_completed():
            if until is not None and time.monotonic() > until:
                raise RuntimeError("the other ranks did not come")
            time.sleep(0.005)
        if work is not None:
            work.wait()

    def _of_cause(self, failed: BaseException | None) -> BaseException:
        """A rank's own failure is raised there; what only follows from another's is raised as that."""
        if failed is not None and not _lost(failed):
            return failed
        cause = None
        if self._store is not None:
            with suppress(RuntimeError):
                cause = self._store.get(str(self._runs)).decode() if self._store.check([str(self._runs)]) else None
        cause = cause or self._peers.cause()  # between two runs
        if cause is None:
            return failed or PipelineError("another rank of the job failed; see what it says")
        error = PipelineError(cause)
        error.__cause__ = failed
        return error


def said(error: BaseException, where: str) -> str:
    """An error in the words of others, with its notes: in which layer it was raised."""
    what = f"{where} of the pipeline failed: {type(error).__name__}: {error}"
    return "; ".join([what, *getattr(error, "__notes__", [])])


def _lost(error: BaseException) -> bool:
    """Whether it says no more than that another rank is not there."""
    return isinstance(error, PeerError) or is_lost(error)
