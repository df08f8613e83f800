"""Reads DSPROF_SET when the process is armed, and has each key applied by the module that knows it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from ..hooking.errors import count_error
from ..hooking.uninstall import Uninstall, in_reverse
from .override import Override

VARIABLE: Final = "DSPROF_SET"
"""A JSON object of keys and values, which `dsprof run --set` writes."""
MODULES: Final = {
    "ddp": "ddp",
    "fsdp2": "fsdp2",
    "loader": "loader",
    "pipelining": "pipelining",
    "optimizer": "optimizers",
    "compile": "compilation",
    "gc": "host",
    "affinity": "host",
    "trainer": "trainers",
    "accelerate": "trainers",
    "lightning": "trainers",
}
"""What a key begins with -> the module of this package that applies it. Any other key is one of a JSON
configuration."""
ARGUMENTS_OF_OPTIMIZERS: Final = ("optimizer.fused", "optimizer.foreach")
"""Of torch.optim: other keys that begin so are of the section `optimizer` of a configuration."""
JSON_CONFIG: Final = "json_config"
OF_THE_ENVIRONMENT: Final = ("env",)
"""The launcher has applied these, by the job's environment."""

Install = Callable[[list[Override]], Uninstall]


def asked() -> dict[str, Any]:
    """Keys and values of DSPROF_SET. Raises ValueError where it is no JSON object."""
    text = os.environ.get(VARIABLE, "")
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f'{VARIABLE} is no JSON object, such as {{"ddp.bucket_cap_mb": 50}}; nothing of it is applied')
    return found


def install() -> Uninstall:
    """Have what is asked for applied from now on. What cannot be, is told, and the job goes on as it is."""
    by_module: dict[str, list[Override]] = {JSON_CONFIG: []}  # which states the configuration that ran, too
    for key, value in asked().items():
        first = key.partition(".")[0]
        override = Override(key, value)
        if first in OF_THE_ENVIRONMENT:
            override.applied(None, by_call=False)
        else:
            in_section = first == "optimizer" and key not in ARGUMENTS_OF_OPTIMIZERS
            module = JSON_CONFIG if in_section else MODULES.get(first, JSON_CONFIG)
            by_module.setdefault(module, []).append(override)
    installed: list[Uninstall] = []
    for module, overrides in by_module.items():
        try:
            of_module: Install = import_module(f"{__package__}.{module}").install
            installed.append(of_module(overrides))
        except Exception as error:
            count_error(f"--set {', '.join(one.key for one in overrides)}", error)
            for one in overrides:
                one.not_applied(f"it could not be installed: {type(error).__name__}: {error}")
    return in_reverse(installed)
