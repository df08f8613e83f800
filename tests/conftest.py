"""Fixtures that several test modules use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsprof.launch import Launch


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Launch]:
    """What the command line would launch, with nothing launched; the working directory is an empty one."""
    seen: list[Launch] = []

    def run(self: Launch) -> int:
        seen.append(self)
        return 0

    monkeypatch.setattr(Launch, "run", run)
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("DSPROF", "PET_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return seen
