"""Who called: the line of the user's code, and the framework that lies between it and the call."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Final

HOME: Final = Path(__file__).parent.parent.parent
"""Where dsprof is."""

FRAMEWORKS: Final = {
    "transformers": "transformers",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "lightning_fabric": "lightning",
    "deepspeed": "deepspeed",
}
"""Package that makes things on the user's behalf -> its name in a fact: he has its settings, not the call's."""
STANDARD_LIBRARY: Final = os.path.dirname(os.__file__)
COMMANDS: Final = frozenset(
    [os.path.dirname(sys.executable), *(sysconfig.get_path("scripts", of) for of in sysconfig.get_scheme_names())]
)
"""Where pip puts the commands of packages: their few lines are nobody's code."""


def caller_site() -> str | None:
    """`file:line` of the nearest frame in the user's own code; if there is none, in the package whose program runs."""
    return caller()[0]


def caller() -> tuple[str | None, str | None]:
    """`caller_site`, and which of FRAMEWORKS lies between it and the call: the outermost, if several do."""
    torch_home = str(Path(sys.modules["torch"].__file__ or "").parent)
    ours = (torch_home, str(HOME), "<")
    installed: list[tuple[str, str]] = []
    """Package and site of each frame in one."""
    framework: str | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(ours):
            module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            package = FRAMEWORKS.get(module)
            framework = package or framework
            site = f"{name}:{frame.f_lineno}"
            if package or "site-packages" in name or "dist-packages" in name:
                home = name.rpartition("-packages/")[2].partition("/")[0]
                installed.append((home if module == "__main__" else module, site))
            elif not name.startswith(STANDARD_LIBRARY) and os.path.dirname(name) not in COMMANDS:
                return site, framework
        frame = frame.f_back
    return next((site for package, site in installed if package == installed[-1][0]), None), framework
