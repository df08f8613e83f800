"""`OnDevice`: where tensors are made, and of which type."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

import torch


class OnDevice:
    """The block in which tensors are made on `device`, and those of fractions as `dtype`, unless they say otherwise.

    On `meta` they have no elements, and `initialize` refuses them.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "meta", enabled: bool = True) -> None:
        if not dtype.is_floating_point:
            raise ValueError(f"OnDevice: dtype={dtype}; write torch.float32, torch.bfloat16 or torch.float16")
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled
        self._undo = ExitStack()

    def __enter__(self) -> None:
        if self.enabled:
            self._undo.enter_context(self.device)
            self._undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()
