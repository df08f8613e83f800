"""Large storages of host memory ask for huge pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsprof.engine.zero.storage import LEAST, use_huge_pages

HUGE = "hg"
"""Of VmFlags, proc_pid_smaps(5): huge pages have been asked for."""


def flags(address: int) -> list[str]:
    """Of the mapping that an address of this process lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(bound, 16) for bound in head.split("-"))
            inside = begin <= address < end
        elif inside and head == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"{address:x} is in no mapping")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="the kernel has no transparent huge pages"
)
@pytest.mark.parametrize(("nbytes", "asked"), [(LEAST, True), (LEAST - 1, False)])
def test_what_is_mapped_by_itself_has_huge_pages(nbytes: int, asked: bool) -> None:
    storage = torch.UntypedStorage(nbytes)
    middle = storage.data_ptr() + nbytes // 2
    before = HUGE in flags(middle)
    use_huge_pages(storage)
    assert (HUGE in flags(middle)) is (asked or before)
    storage.fill_(1)  # every byte is there
    assert storage[0] == storage[nbytes - 1] == 1
