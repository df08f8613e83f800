"""plotly's graph objects, imported with the first figure that is drawn: it takes a third of a second, and what is
written on a terminal has none."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    import plotly.graph_objects as go

    return getattr(go, name)
