"""torch's tensor parallelism: the process groups in which modules are parallelized.

Its collectives are DTensor's, which look like anybody else's; the group is what tells them from gradients.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from ..capture import facts
from ..capture.open_capture import OpenCapture
from ..hooking import dynamo, private
from ..hooking.errors import count_error
from ..hooking.late_imports import when_imported
from ..hooking.uninstall import Uninstall, in_reverse, replace_attribute
from ..hooking.wrap import stands_for

STYLES: Final = "torch.distributed.tensor.parallel.style"
APPLY: Final = "_apply"
"""Method of each style: (module, device mesh)."""


def install(_: OpenCapture) -> list[Uninstall]:
    """State which groups modules are parallelized in from now on."""
    return [when_imported(STYLES, _watch)]


def _watch(module: ModuleType) -> Uninstall:
    base: Any = getattr(module, "ParallelStyle", None)
    private.need(f"{STYLES}:ParallelStyle.{APPLY}")
    styles = [
        value for value in vars(module).values()
        if isinstance(value, type) and base is not None and issubclass(value, base) and value is not base
    ]  # fmt: skip
    return in_reverse(
        replace_attribute(style, APPLY, _applied(getattr(style, APPLY))) for style in styles if APPLY in vars(style)
    )


def _applied(original: Any) -> Any:
    @stands_for(original)
    def apply(self: Any, module: Any, device_mesh: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            facts.state({"fact": "tensor_parallel", "group": device_mesh.get_group(0).group_name})
        except Exception as error:
            count_error("tensor parallelism", error)
        return original(self, module, device_mesh, *args, **kwargs)

    dynamo.skip_frame(apply)
    return apply
