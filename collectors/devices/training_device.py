"""Which accelerator the job trains on."""

from __future__ import annotations

from ..capture.open_capture import OpenCapture
from ..hooking.uninstall import Uninstall


def install(capture: OpenCapture) -> list[Uninstall]:
    """State it after the first step, when the script has chosen: asking the driver earlier could spoil a fork."""

    def state() -> None:
        import torch

        capture.after_step.remove(state)
        if torch.cuda.is_initialized():
            capture.write_fact({"fact": "device", "type": "cuda", **(_describe() if capture.full else {})})

    capture.after_step.append(state)
    return []


def _describe() -> dict[str, object]:
    """What its peak depends on."""
    import torch

    tf32 = torch.get_float32_matmul_precision() != "highest"
    return {"name": torch.cuda.get_device_name(), "tf32": tf32}
