"""What transformers' TrainingArguments, Accelerate's Accelerator and Lightning's Trainer take."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import ModuleType
from typing import Any, Final

from ..hooking.errors import count_error
from ..hooking.late_imports import when_imported
from ..hooking.uninstall import Uninstall, in_reverse, replace_attribute
from ..hooking.wrap import stands_for
from .arguments import override_arguments
from .override import Override

DATACLASS: Final = ("transformers.training_args", "TrainingArguments")
"""Its subclasses are dataclasses, too, each with an `__init__` of its own: all come by `__post_init__`."""
CLASSES: Final = {
    "accelerate": (("accelerate.accelerator", "Accelerator"),),
    "lightning": (
        ("lightning.pytorch.trainer.trainer", "Trainer"),
        ("pytorch_lightning.trainer.trainer", "Trainer"),
    ),
}
"""What a key begins with -> module and class whose arguments it means."""


def install(overrides: list[Override]) -> Uninstall:
    """Apply them to what is made of these classes from now on."""
    installed = []
    for framework, classes in CLASSES.items():
        arguments = {one.name: one for one in overrides if one.key.partition(".")[0] == framework}
        for module, cls in classes if arguments else ():
            installed.append(when_imported(module, partial(_override, cls, arguments)))
    fields = {one.name: one for one in overrides if one.key.startswith("trainer.")}
    if fields:
        installed.append(when_imported(DATACLASS[0], partial(_override_fields, fields)))
    return in_reverse(installed)


def _override_fields(overrides: dict[str, Override], module: ModuleType) -> Uninstall:
    def change(arguments: Any, *_: Any, **__: Any) -> None:
        names = [field.name for field in dataclasses.fields(arguments)]
        for name, override in overrides.items():
            if name in names:
                override.applied(getattr(arguments, name))
                setattr(arguments, name, override.value)
                continue
            override.has_none(f"{DATACLASS[1]} has no", names)

    cls = getattr(module, DATACLASS[1])
    after = cls.__post_init__

    @stands_for(after)
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            change(self)
        except Exception as error:
            count_error("--set trainer", error)
        return after(self, *args, **kwargs)

    return replace_attribute(cls, "__post_init__", __post_init__)


def _override(cls: str, arguments: dict[str, Override], module: ModuleType) -> Uninstall:
    return override_arguments(getattr(module, cls), "__init__", arguments, cls)
