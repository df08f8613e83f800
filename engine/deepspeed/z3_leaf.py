"""`set_z3_leaf_modules`: modules whose parameters stage 3 is to fetch all at once, whichever of them a rank uses.

The engine fetches what a module has by itself, so ranks must run the same modules. A leaf with parameters in modules
below it is refused in stage 3; in the other stages, where no parameter is fetched, it makes no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, or names of classes, with or without their module, and return them."""
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The opposite."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names; returned with them are the names that no module has."""
    return _mark_names(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The same by the ends of names."""
    return _mark_names(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark this module, or take the mark from it."""
    model._z3_leaf = flag  # type: ignore[assignment]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module is marked."""
    return bool(getattr(model, "_z3_leaf", False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked ones in `model`."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def check_leaves(model: nn.Module, stage: int) -> None:
    """Raise ValueError for a mark that would have to have an effect."""
    if stage < 3:
        return
    for name, module in model.named_modules():
        if z3_leaf_module(module) and any(True for child in module.children() for _ in child.parameters()):
            raise ValueError(
                f"initialize: {name or 'the model'} ({type(module).__name__}) is marked by set_z3_leaf_modules, and "
                "stage 3 fetches the modules in it one by one, the same on all ranks: for experts that each rank "
                'chooses by itself write "zero_optimization": {"stage": 2}; where ranks run them all alike, leave the '
                "mark out"
            )


def _mark_classes(
    model: nn.Module, classes: Sequence[type | str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    found = [module for module in model.modules() if any(_is_of(module, wanted) for wanted in classes)]
    if not found and raise_if_not_found:
        there = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        raise ValueError(f"the model has no module of {list(classes)}; it has {there}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_of(module: nn.Module, wanted: type | str) -> bool:
    kind = type(module)
    if isinstance(wanted, str):
        return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return isinstance(module, wanted)


def _mark_names(
    model: nn.Module, wanted: Iterable[str], fits: Callable[[str, str], bool], flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    missing: list[str] = []
    for text in wanted:
        fitting = {name: module for name, module in modules.items() if fits(name, text)}
        found |= fitting
        missing += [] if fitting else [text]
    if missing and raise_if_not_found:
        raise ValueError(f"the model has no module {missing}; named_modules() has their names")
    for module in found.values():
        set_z3_leaf_module(module, flag)
    return list(found.values()), missing
