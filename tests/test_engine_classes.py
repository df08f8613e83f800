"""How classes of the engine are made: state is born in `__init__`, and no method is there only to refuse."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ENGINE: Final = Path(__file__).parents[1] / "engine"

TOLD_BY_RAISING: Final = {"_Probe.forward"}
"""Methods whose only answer is an exception that their caller waits for."""


def classes(source: str) -> list[ast.ClassDef]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


@pytest.fixture(scope="module")
def engine_classes() -> dict[str, ast.ClassDef]:
    return {node.name: node for path in sorted(ENGINE.rglob("*.py")) for node in classes(path.read_text())}


def methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [item for item in node.body if isinstance(item, ast.FunctionDef)]


def assigned(method: ast.FunctionDef) -> Iterator[str]:
    """The attributes of its first argument that a method sets."""
    static = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in method.decorator_list)
    if static or not method.args.args:
        return
    for node in ast.walk(method):
        own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if own and isinstance(node.ctx, ast.Store) and node.value.id == method.args.args[0].arg:
            yield node.attr


def born(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> set[str]:
    """What an object of the class has when it has been made, by the class and by bases that are `known`."""
    found = {method.name for method in methods(node)}
    for item in node.body:
        targets = (
            item.targets if isinstance(item, ast.Assign) else [item.target] if isinstance(item, ast.AnnAssign) else []
        )
        found.update(target.id for target in targets if isinstance(target, ast.Name))
    for method in methods(node):
        if method.name in ("__init__", "__set_name__"):
            found.update(assigned(method))
    for base in node.bases:
        name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
        if name in known and known[name] is not node:
            found |= born(known[name], known)
    return found


def late(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> set[str]:
    return {name for method in methods(node) for name in assigned(method)} - born(node, known)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("def __init__(self): self.a = 1\n def go(self): self.a = 2", set()),
        ("def go(self): self.a = 2", {"a"}),
        ("def go(self):\n  for self.a, (b, self.c) in (): self.d += 1", {"a", "c", "d"}),
        ("def go(self):\n  with open() as self.a:\n   def inner(): self.b: int = 1", {"a", "b"}),
        ("a: int\n def go(self): self.a = 2", set()),
        ("def go(self): self.base = 2", set()),
        ("@staticmethod\n def go(ctx): ctx.a = 2", set()),
    ],
)
def test_attributes_that_are_born_late_are_found(body: str, found: set[str]) -> None:
    known = {node.name: node for node in classes(f"class B:\n def __init__(self): self.base = 1\nclass A(B):\n {body}")}
    assert late(known["A"], known) == found


def test_attributes_are_born_in_init(engine_classes: dict[str, ast.ClassDef]) -> None:
    """Who reads `__init__` knows all that an object has; what a class of torch has is for that to set."""
    assert len(engine_classes) > 200
    assert not {name: found for name, node in engine_classes.items() if (found := late(node, engine_classes))}


def test_no_method_is_there_only_to_refuse(engine_classes: dict[str, ast.ClassDef]) -> None:
    """What DeepSpeed has and the engine has not is in a table (`unsupported`), and `hasattr` tells the truth."""
    only = {
        f"{name}.{method.name}"
        for name, node in engine_classes.items()
        for method in methods(node)
        if not method.name.startswith("__") and isinstance(method.body[-1], ast.Raise)
        and all(isinstance(each, ast.Expr) for each in method.body[:-1])
    }  # fmt: skip
    assert only == TOLD_BY_RAISING
