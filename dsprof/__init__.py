"""dsprof: why a distributed training job is slow, what to change, and how much that will help.

In a training script, all no-ops unless the process is profiled:

    with dsprof.span("augment"):     # a row in the trace and in the timeline
        batch = augment(batch)
    dsprof.mark("loss scale lowered", value=1024.0)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsprof.collectors.spans import mark, span

__version__ = "0.1.0"
__all__ = ["__version__", "mark", "span"]


def __getattr__(name: str) -> Any:
    # Lazy, because `dsprof.schema` is imported in training processes and `dsprof --help` must be quick.
    if name in ("mark", "span"):
        from dsprof.collectors import spans

        return getattr(spans, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
