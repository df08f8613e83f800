"""The `torch.backends` entry point: runs at the end of every `import torch`.

It must cost nothing without DSPROF=1, and never raise: torch turns an exception here into a failed import. But for
one case, DSPROF_ENGINE=dsprof where that cannot be had: better no job than one on another engine than was asked for.
"""

from __future__ import annotations

import os

ON = ("1", "true", "yes", "on")


def autoload() -> None:
    """Arm this process if DSPROF asks for it, and have `import deepspeed` mean our engine if DSPROF_ENGINE does."""
    if os.environ.get("DSPROF_ENGINE"):
        from .bootstrap.sitecustomize import StandIn

        if StandIn.wanted():
            StandIn.install()
    if os.environ.get("DSPROF", "").lower() in ON:
        from .arming.process import arm

        arm()
