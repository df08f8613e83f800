"""Which lines of the script issue which collectives: at level full, so that ranks that disagree about one can be told
where each issued its own. A line is stated once for each name, size and type: where several lines issue the same,
none of them is to be taken for the one that issued a certain collective.

Only calls from Python pass here, and not those of DDP's reducer, which the script's backward issues.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from dsprof.schema import CALL_SITE, DTYPES

from . import dynamo, facts
from .collective_kernels import payload
from .collector import OpenCapture
from .errors import count_error
from .uninstall import Uninstall
from .waits import replace_method

METHODS: Final = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "allgather": "all_gather",
    "_allgather_base": "all_gather", "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "alltoall": "all_to_all", "alltoall_base": "all_to_all",
    "broadcast": "broadcast", "reduce": "reduce", "gather": "gather", "scatter": "scatter", "barrier": "barrier",
}  # fmt: skip
"""Of ProcessGroup -> the name in the trace."""
MOST: Final = 500
"""Lines, of a name, size and type each, that are stated; where there are more, that is stated."""


def install(capture: OpenCapture) -> list[Uninstall]:
    """State where collectives are issued from now on, at level full."""
    import torch.distributed as dist

    if not capture.full or not dist.is_available():
        return []
    sites = CallSites(capture.write_fact)
    return [replace_method(dist.ProcessGroup, method, sites.watch(name)) for method, name in METHODS.items()]


class CallSites:
    """Those of one capture."""

    def __init__(self, write_fact: Callable[[facts.Fact], None]) -> None:
        self._write_fact = write_fact
        self._known: set[tuple[str, int, int, str | None]] = set()

    def watch(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """What wraps the method that issues collectives of this name."""

        def watched(original: Callable[..., Any]) -> Callable[..., Any]:
            def issue(self: Any, *args: Any, **kwargs: Any) -> Any:
                if not dynamo.compiling():
                    try:
                        note(name, args)
                    except Exception as error:
                        count_error("call sites", error)
                return original(self, *args, **kwargs)

            return issue

        note = self._note
        return watched

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        if len(self._known) > MOST:  # before the sizes and the stack are looked at
            return
        size, dtype, _ = (0, 0, True) if name == "barrier" or not args else payload(args)
        known = (name, size, dtype, facts.caller_site())
        if known in self._known:
            return
        self._known.add(known)
        if len(self._known) > MOST:
            self._write_fact({"fact": CALL_SITE, "more": True})
            return
        self._write_fact({"fact": CALL_SITE, "name": name, "bytes": size, "dtype": DTYPES[dtype], "site": known[3]})
