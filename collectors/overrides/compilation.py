"""torch.compile: how it compiles, and whether it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..hooking.uninstall import Uninstall
from .arguments import Arguments, given, override_arguments
from .override import Override

USUAL: Final = "inductor"
"""The backend that has modes."""


def install(overrides: list[Override]) -> Uninstall:
    """Apply them to every call of torch.compile from now on, by `Module.compile` and as a decorator, too."""
    import torch

    arguments = {override.name: override for override in overrides}
    return override_arguments(torch, "compile", arguments, "torch.compile", _with_mode)


def _with_mode(arguments: Arguments, overrides: Mapping[str, Override]) -> Mapping[str, Any]:
    """What torch.compile takes together: it refuses a mode beside options, and only its own backend knows modes."""
    wanted = given(arguments, overrides)
    if "mode" not in wanted:
        return wanted
    backend = arguments.get("backend")
    if arguments.get("options"):
        overrides["mode"].not_applied("the script gives torch.compile options, which take the place of a mode")
        del wanted["mode"]
    elif backend not in (None, USUAL):
        overrides["mode"].not_applied(f"the script compiles with another backend than {USUAL}, which has no modes")
        del wanted["mode"]
    return wanted
