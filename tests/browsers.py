"""The system's Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any, Final

import pytest

CHROMIUM: Final = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
PATIENCE_S: Final = 120.0
"""For a browser on a busy machine: no test measures how long it takes."""


@contextlib.contextmanager
def running_browser() -> Iterator[Any]:
    """A browser without a window. Skips the test where there is none."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
            timeout=PATIENCE_S * 1000,
        )
        yield running
        running.close()
