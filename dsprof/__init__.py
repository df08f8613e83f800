"""dsprof: why a distributed training job is slow, what to change, and how much that will help.

In a training script, all no-ops unless the process is profiled:

    with dsprof.span("augment"):     # a row in the trace and in the timeline
        batch = augment(batch)
    dsprof.mark("loss scale lowered", value=1024.0)

In a notebook, or any Python program:

    run = dsprof.load(".")           # the newest run: its verdict, tables, figures, what-ifs
    with dsprof.profile("cell") as run:      # profile what runs here, in this process
        train(model, loader)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsprof.collectors.spans import mark, span
    from dsprof.interactive.loaded_run import Run, load
    from dsprof.interactive.profiled import profile

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "load", "mark", "profile", "span"]


def __getattr__(name: str) -> Any:
    # Lazy, because `dsprof.schema` is imported in training processes and `dsprof --help` must be quick.
    if name in ("mark", "span"):
        from dsprof.collectors import spans

        return getattr(spans, name)
    if name in ("Run", "load"):
        from dsprof.interactive import loaded_run

        return getattr(loaded_run, name)
    if name == "profile":
        from dsprof.interactive.profiled import profile

        return profile
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
