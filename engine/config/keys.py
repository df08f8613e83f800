"""The first look at a configuration: which keys are there. Values are not looked at yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dsprof.words import joined, nearest, similarity

from .deepspeed_keys import FOREIGN, RENAMED, REPLACED, Foreign
from .model import Section, sections, shown

MISPLACED_ABOVE: Final = 0.8
"""How like a misspelt key a neighbour must be to be named although another section has that very key."""
FEW: Final = 12
"""Keys that fit into a line."""


@dataclass
class Notes:
    """What there is to say, in the order in which it was found. Each begins with the key it is about."""

    problems: list[str] = field(default_factory=list)
    """Errors."""
    warnings: list[str] = field(default_factory=list)
    """What is taken, but not as it stands."""


def known_keys(raw: Mapping[Any, Any], root: type[Section], notes: Notes) -> dict[str, Any]:
    """The keys of `raw` that `root` and its sections have, under today's names; about all others there is a note."""
    return _Look(root, notes).at(raw, root, "")


def known_paths(root: type[Section]) -> tuple[set[str], set[str]]:
    """Every key there is, with the sections that lead to it: those of `root`, and those that DeepSpeed alone has, below
    which there may be more."""
    own = {joined(where, key) for where, section in sections(root) for key in section.model_fields}
    return own, {joined(where, key) for where, keys in FOREIGN.items() for key in keys}


@dataclass(frozen=True)
class _Look:
    root: type[Section]
    notes: Notes

    def at(self, raw: Mapping[Any, Any], model: type[Section], where: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in self._today(raw, model, where).items():
            path = joined(where, key)
            if key in model.model_fields:
                section = model.section_of(key, raw)
                values[key] = self.at(value, section, path) if section and isinstance(value, Mapping) else value
            elif key in FOREIGN.get(where, {}):
                self._note_foreign(path, value, FOREIGN[where][key])
            else:
                self.notes.problems.append(f"{path}: {self._unknown(key, model, where)}")
        return values

    def _today(self, raw: Mapping[Any, Any], model: type[Section], where: str) -> dict[str, Any]:
        """`raw` with today's names in place of old ones."""
        values: dict[str, Any] = {}
        for key, value in raw.items():
            path = joined(where, key)
            today = RENAMED.get(where, {}).get(key)
            replacement = REPLACED.get(where, {}).get(key)
            if today is not None and today in raw:
                self.notes.problems.append(f"{path}: is another name of {today}, which is given too; remove it")
            elif today is not None:
                self.notes.warnings.append(f"{path}: is another name of {today}; write that")
                values[today] = value
            elif replacement is not None:
                if self._switched_on(path, value, replacement, raw):
                    values[replacement] = {"device": "cpu"}
            elif path == "zero_optimization" and isinstance(value, bool):
                self.notes.warnings.append(f'{path}: is an old way to write {{"stage": {int(value)}}}; write that')
                values[path] = {"stage": int(value)}
            else:
                values[str(key)] = value
        return values

    def _switched_on(self, path: str, value: object, replacement: str, raw: Mapping[Any, Any]) -> bool:
        """Whether an old switch asks for the section that has taken its place."""
        means = f'"{replacement}": {{"device": "cpu"}}'
        if not isinstance(value, bool):
            self.notes.problems.append(f"{path}: {shown(value)} is not true or false; write {means} instead")
        elif not value:
            self.notes.warnings.append(f"{path}: is an old way to write {means}, and is off; remove it")
        elif replacement in raw:
            self.notes.problems.append(f"{path}: means {means}, and {replacement} is given too; remove {path}")
        else:
            self.notes.warnings.append(f"{path}: is an old way to write {means}; write that")
            return True
        return False

    def _note_foreign(self, path: str, value: object, foreign: Foreign) -> None:
        if not foreign.refused:
            self.notes.warnings.append(f"{path}: has no effect; {foreign.says}")
        elif foreign.is_off(value):
            self.notes.warnings.append(f"{path}: has no effect; it is off, and this engine does not have it")
        else:
            self.notes.problems.append(f"{path}: DeepSpeed's key, which this engine does not have; {foreign.says}")

    def _unknown(self, key: str, model: type[Section], where: str) -> str:
        foreign = FOREIGN.get(where, {})
        near, theirs = nearest(key, model.model_fields, meanings=ALIASES), nearest(key, foreign)
        elsewhere = self._sections_with(key)
        if elsewhere and (near is None or similarity(key, near) < MISPLACED_ABOVE):
            return f"not a key here but of {' and of '.join(elsewhere)}; move it there"
        if theirs is not None and (
            near is None or similarity(key, theirs) > max(similarity(key, near), MISPLACED_ABOVE)
        ):
            return f"unknown key; the nearest is {theirs}, which DeepSpeed has and this engine has not"
        if near is not None:
            return f"unknown key; the nearest is {near}"
        meant = ALIASES.get(key.lower(), "")
        if elsewhere := self._sections_with(meant):
            return f"unknown key; {meant} is of {' and of '.join(elsewhere)}; move it there"
        if len(model.model_fields) <= FEW:
            return f"unknown key, and none here is like it; the keys are {', '.join(model.model_fields)}"
        return "unknown key, and none here is like it; docs/engine-config.md has all keys"

    def _sections_with(self, key: str) -> list[str]:
        """Sections that have a key of this name, unless half of all sections do."""
        found = [path or "the top" for path, section in sections(self.root) if key in section.model_fields]
        return [] if key in ("enabled", "type", "params") else list(dict.fromkeys(found))


ALIASES: Final = {
    "decay": "weight_decay",
    "epsilon": "eps",
    "grad_accum_steps": "gradient_accumulation_steps",
    "grad_clip": "gradient_clipping",
    "learning_rate": "lr",
    "l2": "weight_decay",
    "max_grad_norm": "gradient_clipping",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "wd": "weight_decay",
    "weightdecay": "weight_decay",
}
"""Word, in lower case -> the key of that meaning, however unlike."""
