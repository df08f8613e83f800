"""What an export calls things: `dsprof.reports.export` writes it, and `dsprof import` reads it back."""

from __future__ import annotations

from typing import Final

ABOUT: Final = "dsprof"
"""Key of what is said of the run beside the events of a Chrome trace, and annotation of a moment in a Perfetto one."""
PARQUET: Final = b"dsprof.export"
"""Its key among the metadata of a Parquet file."""
EXPORT_SCHEMA: Final = 1
PROFILER_STEP: Final = "ProfilerStep#"
"""How torch.profiler calls a step; its number follows."""
COLLECTIVE: Final = "Collective name"
"""What torch.profiler calls the collective that a kernel is of."""
DETAILS: Final = (
    "step", "module", "purpose", "group", "seq", "peer", "tag", "bytes", "dtype", "stage", "microbatch", "site",
    "value", "source", "root", "grad", "host_ns", "thread",
)  # fmt: skip
"""Columns that a slice tells beside its name."""
SINCE: Final = (("issue_ns", "issued_ns_before", -1), ("arrival_ns", "arrived_ns_after", 1))
"""Columns of moments; what a slice calls how long before (-1) or after (1) it begins they were."""
