"""Whether the ranks gathered the same parameters in one order, where gathers of different content can mix."""

from __future__ import annotations

from typing import Final
from zlib import crc32

import torch
import torch.distributed as dist

from ..comm.comm import Comm, Content
from ..comm.consensus import difference, gather_objects

NOTHING: Final = Content(0, ("nothing",))


class OrderCheck:
    """The gathers of this rank with the others of `comm` since the last step, to be held against theirs: NCCL has no
    tags, nor have broadcasts. What mixed is found before the optimizer steps by it."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._contents: list[Content] = []

    def add(self, content: Content) -> None:
        """It is being gathered."""
        self._contents.append(content)

    def check(self, everyone: Comm) -> None:
        """Begin anew. Raises RuntimeError on all ranks of the job if ranks that share parameters gathered different
        ones. On all ranks; costs one collective of 16 bytes a rank."""
        contents, self._contents = self._contents, []
        rows = torch.zeros(everyone.size, 2, dtype=torch.int64, device=everyone.device)
        tags = ",".join([str(content.tag) for content in contents])
        mine = [self._first_rank, crc32(tags.encode())]
        rows[everyone.rank] = torch.tensor(mine, device=everyone.device)
        everyone.all_gather(rows, "parameter").wait()
        found = [tuple(row) for row in rows.tolist()]
        firsts = {first for first, _ in found}
        if len(set(found)) == len(firsts):
            return
        sets = [[rank for rank, (first, _) in enumerate(found) if first == each] for each in sorted(firsts)]
        mixed = difference(gather_objects(dict(enumerate(contents)), everyone), sets)
        assert mixed is not None  # equal contents have equal digests
        wanted = mixed.listed(lambda content: ", ".join((content or NOTHING).names[:4]), ("wanted", "wanted"))
        raise RuntimeError(
            "ZeRO stage 3: the ranks ran different modules in this step, and what they gathered for each other is "
            f"mixed up, first where {wanted}. All must run the same modules in the same order: where the data decide, "
            "run the branch on all ranks (times 0 where it is not wanted), or write a lower stage. The weights are "
            "those before this step"
        )

    @property
    def _first_rank(self) -> int:
        return 0 if self._comm.group is None else dist.get_global_rank(self._comm.group, 0)
