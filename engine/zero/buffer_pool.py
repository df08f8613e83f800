"""Memory of communications that is used again."""

from __future__ import annotations

import torch
from torch import Tensor


class BufferPool:
    """Memory that communications have used, for the next ones: on a CPU, fresh pages cost as much as these. Of what is
    given back, the `most` largest are kept; all, by default."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.free: list[Tensor] = []
        self._read: dict[int, torch.cuda.Event] = {}
        """By the storage of a free buffer on a GPU: what was given to the device before it was given back."""

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer [size]: the smallest free one that holds it, or new."""
        fitting = [b for b in self.free if b.numel() >= size and b.dtype == dtype and b.device == device]
        if not fitting:
            with torch.inference_mode(False):  # it is used again, by training
                return torch.empty(size, dtype=dtype, device=device)
        best = min(fitting, key=Tensor.numel)
        self.free = [buffer for buffer in self.free if buffer is not best]
        event = self._read.pop(best.untyped_storage()._cdata, None)
        if event is not None:  # it may have been on another stream: a backward has its own
            torch.cuda.current_stream().wait_event(event)
        return best[:size]

    def give(self, buffer: Tensor) -> None:
        """Give back a buffer that was taken, or a view of it."""
        flat = buffer.view(-1)
        whole = torch.as_strided(flat, (flat.untyped_storage().nbytes() // flat.element_size(),), (1,), 0)
        if buffer.is_cuda:
            event = torch.cuda.Event()
            event.record()
            self._read[whole.untyped_storage()._cdata] = event
        kept = sorted([*self.free, whole], key=Tensor.numel, reverse=True)
        self.free = kept[: self._most]
        for dropped in kept[len(self.free) :]:
            self._drop(dropped)

    def clear(self) -> None:
        """Have no buffer any more."""
        for buffer in self.free:
            self._drop(buffer)
        self.free = []

    def _drop(self, buffer: Tensor) -> None:
        """Free a buffer, for the stream it was made for when this one is through with it."""
        event = self._read.pop(buffer.untyped_storage()._cdata, None)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
            buffer.record_stream(torch.cuda.current_stream())
