"""Another value for an argument of a call in a Python text, which otherwise stays as it is."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Final

from .edit_json import CannotEdit

CALLS: Final[Mapping[str, tuple[str, ...]]] = {
    "ddp": ("DistributedDataParallel", "DDP"),
    "loader": ("DataLoader",),
    "fsdp2": ("fully_shard",),
}
"""Framework of a knob -> names of what takes it. Other names count where the file imports it or derives from it so."""
BY_POSITION: Final[Mapping[str, tuple[str, ...]]] = {
    "ddp": (
        "module", "device_ids", "output_device", "dim", "broadcast_buffers", "init_sync", "process_group",
        "bucket_cap_mb", "find_unused_parameters", "check_reduction", "gradient_as_bucket_view", "static_graph",
    ),
    "loader": (
        "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory",
        "drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    ),
}  # fmt: skip
"""Framework of a knob -> arguments that torch takes without their names, too, in their order."""
_SKIPPED: Final = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
_BOM: Final = "\ufeff"


def set_argument(text: str, line: int, framework: str, argument: str, value: Any) -> str:
    """`text` with `argument=value` in the call at `line` (from 1). Raises CannotEdit."""
    if text.startswith(_BOM):
        return _BOM + set_argument(text[1:], line, framework, argument, value)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise CannotEdit(f"it is no Python that can be read (line {getattr(error, 'lineno', None) or 1})") from None
    call = _call(tree, line, framework)
    start, end, written = _edit(text, call, line, framework, f"{argument}={value!r}", argument)
    data = text.encode()
    edited = (data[:start] + written.encode() + data[end:]).decode()
    _check(edited, call, line, "" if written == repr(value) else argument)
    return edited


def _edit(text: str, call: ast.Call, line: int, framework: str, written: str, argument: str) -> tuple[int, int, str]:
    """Which bytes of the text are replaced, and by what. written: `argument=value`."""
    lines = re.findall(r"[^\r\n]*(?:\r\n|\r|\n|$)", text)  # as Python counts them: a form feed begins none
    starts = [0, *accumulate(len(one.encode()) for one in lines)]

    def span(node: ast.expr | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    by_hand = f"so {argument} may be among them already; write {written} by hand"
    for keyword in call.keywords:
        if keyword.arg == argument:
            return *span(keyword), written
    if any(keyword.arg is None for keyword in call.keywords):
        raise CannotEdit(f"the call at line {line} takes arguments from a dictionary (**), {by_hand}")
    names = BY_POSITION.get(framework, ())
    place = names.index(argument) if argument in names else len(call.args)
    if any(isinstance(one, ast.Starred) for one in call.args):
        raise CannotEdit(f"the call at line {line} takes arguments from a list (*), {by_hand}")
    if place < len(call.args):
        return *span(call.args[place]), written.partition("=")[2]
    close = span(call)[1] - 1
    last, at = _last_token(lines, starts, close)
    if last == ",":
        return at - 1, at - 1, f", {written}"
    return at, at, written if last == "(" and not (call.args or call.keywords) else f", {written}"


def _last_token(lines: list[str], starts: list[int], close: int) -> tuple[str, int]:
    """What stands before the closing parenthesis at byte `close`, but comments, and the byte at which it ends."""
    found = ("", 0)
    for token in tokenize.generate_tokens(iter([*lines, ""]).__next__):
        row, column = token.end
        end = starts[row - 1] + len(lines[row - 1][:column].encode())
        if end > close:
            break
        if token.type not in _SKIPPED:
            found = (token.string, end)
    return found


def _check(edited: str, call: ast.Call, line: int, argument: str) -> None:
    """Raises CannotEdit unless the text is Python and the call has the argument, by its name; empty: by its place."""
    try:
        calls = [node for node in ast.walk(ast.parse(edited)) if isinstance(node, ast.Call)]
    except SyntaxError:
        raise CannotEdit(f"the call at line {line} is not one that can be edited; write it by hand") from None
    begin = (call.lineno, call.col_offset)
    same = [node for node in calls if (node.lineno, node.col_offset) == begin and _name(node.func) == _name(call.func)]
    wanted = {one.arg for one in call.keywords} | ({argument} if argument else set())
    if not any(wanted == {one.arg for one in node.keywords} and len(node.args) == len(call.args) for node in same):
        raise CannotEdit(f"the call at line {line} is not one that can be edited; write it by hand")


def _call(tree: ast.Module, line: int, framework: str) -> ast.Call:
    names = _names(tree, CALLS[framework])
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    around = [node for node in calls if node.lineno <= line <= (node.end_lineno or node.lineno)]
    named = [node for node in around if _name(node.func) in names]
    if len(named) == 1:
        return named[0]
    of = CALLS[framework][0]
    if named:
        raise CannotEdit(f"line {line} has {len(named)} calls of {of}")
    raise CannotEdit(f"line {line} has no call of {of}: it is made in another way there, or the file was edited since")


def _names(tree: ast.Module, names: tuple[str, ...]) -> set[str]:
    """`names`, under which name the file imports them, and classes that derive from them and take what they take."""
    known = set(names)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            known |= {one.asname for one in node.names if one.asname and one.name in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(_name(base) in known for base in node.bases):
            own = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            if not own & {"__init__", "__new__"}:
                known.add(node.name)
    return known


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
