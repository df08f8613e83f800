"""The JSON configuration of DeepSpeed and of dsprof's engine: what it was, as a fact, and other values in it."""

from __future__ import annotations

import copy
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Final

from dsprof.redact import redact_data

from ..hooking.caller import caller
from ..hooking.errors import count_error
from ..hooking.late_imports import when_imported
from ..hooking.statements import state
from ..hooking.uninstall import Uninstall, in_reverse, replace_attribute
from ..hooking.wrap import stands_for
from .override import Override

ENGINES: Final = {"deepspeed": "deepspeed", "dsprof.engine.setup.initialize": "dsprof"}
"""Module that has `initialize` -> whose configuration it takes."""
NAMES: Final = ("config", "config_params")
"""Arguments of `initialize` that a configuration comes in; the first that is given counts."""
BATCH: Final = ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size")
"""train_batch_size = micro-batch x accumulation x data-parallel ranks. The first that was not turned is found anew."""
LARGEST: Final = 64 << 10
"""Characters of JSON that a fact holds."""


def install(overrides: list[Override]) -> Uninstall:
    """Apply them to every `initialize` from now on, and state the configuration that results."""
    return in_reverse(
        [when_imported(module, partial(_watch, dialect, overrides)) for module, dialect in ENGINES.items()]
    )


def _watch(dialect: str, overrides: Sequence[Override], module: ModuleType) -> Uninstall:
    if hasattr(module.__loader__, "stands_in_for"):  # ours in DeepSpeed's place, which calls the other one
        return lambda: None
    initialize = module.initialize
    signature = inspect.signature(initialize)

    @stands_for(initialize)
    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
            _change(bound, dialect, overrides)
            args, kwargs = bound.args, bound.kwargs
        except TypeError:  # the call itself will say so
            pass
        except Exception as error:
            count_error("the configuration", error)
        return initialize(*args, **kwargs)

    return replace_attribute(module, "initialize", watched)


def _change(bound: inspect.BoundArguments, dialect: str, overrides: Sequence[Override]) -> None:
    given = next((bound.arguments[name] for name in NAMES if bound.arguments.get(name) is not None), None)
    arguments = bound.arguments.get("args")
    by_flag = given is None
    if by_flag:
        given = getattr(arguments, "deepspeed_config", None)
    content = _content(given)
    if content is None:
        for override in overrides:
            override.not_applied("the job has no JSON configuration that can be read")
        return
    changed = copy.deepcopy(content)
    for override in overrides:
        _put(changed, override)
    _solve_batch(changed, overrides)
    _state(dialect, given, changed)
    if not overrides:
        return
    for name in NAMES:
        bound.arguments.pop(name, None)
    bound.arguments["config"] = changed
    if by_flag:  # given twice, DeepSpeed refuses it
        flags: Any = copy.copy(arguments)
        flags.deepspeed_config = None
        bound.arguments["args"] = flags


def _content(given: Any) -> dict[str, Any] | None:
    """The configuration as a dictionary; None: there is none that can be read."""
    if isinstance(given, Mapping):
        return dict(given)
    try:
        with open(given, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def _put(content: dict[str, Any], override: Override) -> None:
    """Another value for a key, sections on the way to it made where they are not there."""
    *sections, last = override.key.split(".")
    place = content
    for section in sections:
        inner = place.setdefault(section, {})
        if not isinstance(inner, dict):
            override.not_applied(f"{section} is no section in the job's configuration")
            return
        place = inner
    was = place.get(last)
    place[last] = override.value
    override.applied(was)


def _solve_batch(content: dict[str, Any], overrides: Sequence[Override]) -> None:
    """Leave out one of the three batch sizes where all are given and one was turned: the engine finds it from the two
    others. What was turned stays, and of the others the batch of a step does, so that the job trains on as it did."""
    turned = {override.key for override in overrides if override.key in BATCH}
    if not turned or len(turned) == len(BATCH) or not all(type(content.get(key)) is int for key in BATCH):
        return
    left_out, *kept = (key for key in BATCH if key not in turned)
    size = content.pop(left_out)
    that = "".join(f", so that {key} stays {content[key]}" for key in kept)
    text = f"--set {', '.join(sorted(turned))}: {left_out}, which is {size} in the configuration, is found anew{that}"
    state({"fact": "note", "text": f"{text}; a script that makes its own batches has to make them as large"})


def _state(dialect: str, given: Any, content: Mapping[str, Any]) -> None:
    """The fact `config`. What is secret in it is redacted; one that is too long is left out."""
    text = json.dumps(redact_data(content), default=str)
    site, framework = caller()
    path = os.path.abspath(given) if isinstance(given, (str, os.PathLike)) else None
    fact = {"fact": "config", "dialect": dialect, "path": path, "site": site, "framework": framework}
    state({**fact, "content": json.loads(text) if len(text) <= LARGEST else None})
