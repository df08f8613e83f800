"""Sections as JSON, for what draws them in a browser by itself: each block has its `kind` beside its fields."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from .section import Figure, Report, kind


def report_json(report: Report) -> dict[str, Any]:
    """A whole report: `head` and `sections`."""
    found: dict[str, Any] = _plain(report)
    return found


def figure_json(figure: Figure) -> dict[str, Any]:
    """A figure with the words around it."""
    return {
        "kind": kind(figure), "name": figure.name, "label": figure.label, "note": figure.note, "height": figure.height,
        "figure": figure.plain(),
    }  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, Figure):
        return figure_json(value)
    if is_dataclass(value):
        return {"kind": kind(value), **{one.name: _plain(getattr(value, one.name)) for one in fields(value)}}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value
