"""Why a request has no answer."""

from __future__ import annotations

from typing import Final

NOTHING_TO_SHOW: Final = 422


class CannotAnswer(Exception):
    """There is no answer, for the reason that the message says. status: of HTTP."""

    def __init__(self, why: str, status: int = NOTHING_TO_SHOW) -> None:
        super().__init__(why)
        self.status = status
