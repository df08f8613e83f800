"""The entry point `tensorboard_plugins`.

Every TensorBoard on the machine imports this module, and one that raises here does not start: so it imports nothing but
TensorBoard, and what goes wrong later costs the tab alone.
"""

from __future__ import annotations

import logging
from typing import Any

from tensorboard.plugins import base_plugin


class TabLoader(base_plugin.TBLoader):  # type: ignore[misc]
    """Loads the tab. None where it cannot be had."""

    def load(self, context: Any) -> Any:
        try:
            from .plugin import DsprofTab

            return DsprofTab(context)
        except Exception as error:
            logging.getLogger(__name__).warning("the dsprof tab is left out: %s: %s", type(error).__name__, error)
            return None
