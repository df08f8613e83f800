"""dsprof's training engine: ZeRO with DeepSpeed's configuration and API.

    engine, optimizer, dataloader, lr_scheduler = dsprof.engine.initialize(model=model, config="ds.json", ...)

Names are loaded when they are used: importing `dsprof.engine.config` or `dsprof.engine.hooks` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import checkpointing, zero
    from .arguments import add_config_arguments
    from .config import Config, ConfigError
    from .engine import Engine
    from .setup import init_distributed, initialize

_HOME = {
    "initialize": "setup",
    "init_distributed": "setup",
    "add_config_arguments": "arguments",
    "Engine": "engine",
    "Config": "config",
    "ConfigError": "config",
}

__all__ = [
    "Config",
    "ConfigError",
    "Engine",
    "add_config_arguments",
    "checkpointing",
    "init_distributed",
    "initialize",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        found = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    elif name in ("zero", "checkpointing"):
        found = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found  # a submodule of the same name must not come back instead
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
