"""Another value for an argument of a call in a Python text, which otherwise stays as it is."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, Final

from .edit_json import CannotEdit

CALLS: Final[Mapping[str, tuple[str, ...]]] = {
    "ddp": ("DistributedDataParallel", "DDP"),
    "loader": ("DataLoader",),
    "fsdp2": ("fully_shard",),
}
"""Framework of a knob -> names of what takes it. Under another name it is the only call that begins on the line."""


def set_argument(text: str, line: int, framework: str, argument: str, value: Any) -> str:
    """`text` with `argument=value` in the call at `line` (from 1). Raises CannotEdit."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise CannotEdit(f"it is no Python that can be read (line {error.lineno})") from None
    call = _call(tree, line, CALLS[framework])
    lines = text.splitlines(keepends=True)
    starts = [0]
    for one in lines:
        starts.append(starts[-1] + len(one.encode()))
    data = text.encode()

    def place(at_line: int, column: int) -> int:
        return starts[at_line - 1] + column

    written = f"{argument}={value!r}".encode()
    for keyword in call.keywords:
        if keyword.arg == argument:
            assert keyword.end_lineno is not None
            assert keyword.end_col_offset is not None
            start, end = place(keyword.lineno, keyword.col_offset), place(keyword.end_lineno, keyword.end_col_offset)
            return (data[:start] + written + data[end:]).decode()
    assert call.end_lineno is not None
    assert call.end_col_offset is not None
    close = place(call.end_lineno, call.end_col_offset) - 1
    inside = data[:close].rstrip()
    if inside.endswith(b"("):
        return (inside + written + data[close:]).decode()
    given: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    end = max(place(one.end_lineno or 0, one.end_col_offset or 0) for one in given)
    return (data[:end] + b", " + written + data[end:]).decode()


def _call(tree: ast.Module, line: int, names: tuple[str, ...]) -> ast.Call:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    around = [node for node in calls if node.lineno <= line <= (node.end_lineno or node.lineno)]
    named = [node for node in around if _name(node.func) in names]
    here = [node for node in around if node.lineno == line]
    for found in (named, here):
        if len(found) == 1:
            return found[0]
    if len(named) > 1:
        raise CannotEdit(f"line {line} has {len(named)} calls of {names[0]}")
    raise CannotEdit(f"line {line} has no call of {names[0]}; the file has changed since the run")


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
