"""The files of the user's that a change is made in: a diff to look at, and the changed texts."""

from __future__ import annotations

import difflib
import json
import shlex
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from dsprof.atomic import write_atomically
from dsprof.knobs import FACT_OF, KNOBS, fsdp2
from dsprof.redact import REDACTED, redact_setting

from .batch_sizes import with_the_third
from .edit_call import CALLS, set_argument
from .edit_json import CannotEdit, set_value

Facts = Mapping[str, Sequence[Mapping[str, Any]]]

_Call = tuple[Path, int, str, str, Any]
"""File and line of a call; framework, name and value of its argument."""
ARGUMENTS_OF_FSDP2: Final = ("reshard_after_forward",)
NOT_ARGUMENTS: Final = {
    "ddp.comm_hook",
    "ddp.accumulate",
    *(knob.key for knob in fsdp2.KNOBS if knob.key.partition(".")[2] not in ARGUMENTS_OF_FSDP2),
}
"""Knobs of calls that are no arguments of theirs, or ones that need more than a value."""
OF_SCRIPT: Final = {knob.key for knob in KNOBS}
"""Keys that are of no JSON configuration."""


@dataclass
class Changes:
    """texts: what each file is to be; before: what it is; left: what no file can be changed for, and what to type."""

    texts: dict[Path, str] = field(default_factory=dict)
    before: dict[Path, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def edit(self, path: Path, change: Any) -> None:
        """Apply `change` to a file's text. Raises CannotEdit or OSError."""
        try:
            if path not in self.texts:
                with open(path, encoding="utf-8", newline="") as file:  # its ends of lines stay what they are
                    self.before[path] = self.texts[path] = file.read()
            self.texts[path] = change(self.texts[path])
        except CannotEdit as error:
            raise CannotEdit(f"{path}: {error}") from None
        except UnicodeDecodeError:
            raise CannotEdit(f"{path}: it is not written in UTF-8") from None

    def write(self, places: Mapping[Path, Path]) -> None:
        """Write the changed texts, each to its place, with the mode of the original. Raises CannotEdit where one is
        read-only, or OSError; then none is written."""
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in self.texts}
        for path, mode in modes.items():
            if places[path] == path.resolve() and not mode & stat.S_IWUSR:
                raise CannotEdit(f"{path}: it is read-only")
        written: list[Path] = []
        try:
            for path, text in self.texts.items():
                write_atomically(places[path], text, mode=modes[path])
                written.append(path)
        except OSError:
            for path in written:
                if places[path] == path.resolve():
                    write_atomically(places[path], self.before[path], mode=modes[path])
                else:
                    places[path].unlink(missing_ok=True)
            raise

    def diff(self, cwd: Path) -> str:
        """A unified diff of all files."""
        parts: list[str] = []
        for path, text in self.texts.items():
            name = str(path.relative_to(cwd) if path.is_relative_to(cwd) else path).lstrip("/")
            old, new = (one.replace("\r\n", "\n").splitlines(keepends=True) for one in (self.before[path], text))
            parts += difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in parts)


def changes(knobs: Mapping[str, Any], facts: Facts, cwd: Path, turned: Collection[str] = ()) -> Changes:
    """How the user's files are to be changed for `knobs`, by what the run says of itself. Raises CannotEdit or OSError.

    cwd: where the job ran; a relative path is of there
    turned: keys that `--set` turned in that run, whose configuration is then not that of the file
    """
    found = Changes()
    calls: list[_Call] = []
    of_configuration: dict[str, Any] = {}
    for key, value in knobs.items():
        framework, _, name = key.partition(".")
        if framework == "env":
            found.left.append(f"export {name}={shlex.quote(redact_setting(name, str(value)))}")
        elif framework in CALLS and key not in NOT_ARGUMENTS:
            calls += _calls(found, facts, cwd, framework, name, value)
        elif key in OF_SCRIPT or f"{framework}.*" in OF_SCRIPT:
            found.left.append(f"{key}={value}: change it where the script sets it")
        else:
            of_configuration[key] = value
    if of_configuration:
        _edit_configurations(found, facts, cwd, of_configuration, check=not turned)
    # The last line of a file first: an edit that takes lines away leaves the numbers of those above as they are.
    for path, line, *argument in sorted(calls, key=lambda one: (str(one[0]), -one[1])):
        found.edit(path, partial(_set_argument, line, *argument))
    return found


def _set_argument(line: int, framework: str, name: str, value: Any, text: str) -> str:
    return set_argument(text, line, framework, name, value)


def _calls(found: Changes, facts: Facts, cwd: Path, framework: str, name: str, value: Any) -> Iterator[_Call]:
    """The calls in the user's own code that take an argument. Raises CannotEdit where the run made none."""
    call, told = CALLS[framework][0], facts.get(FACT_OF[framework], ())
    if not told:
        raise CannotEdit(f"{framework}.{name}: the run has no {call}")
    sites = dict.fromkeys(site for fact in told for site in _sites(fact))
    if not sites:
        found.left.append(f"{call}({name}={value!r}): where it is called was not seen")
    for site in sites:
        file, _, line = site.rpartition(":")
        yield cwd / file, int(line), framework, name, value


def _sites(fact: Mapping[str, Any]) -> list[str]:
    """Lines of the user's own code that made what a fact tells of: all of them, or where it does not tell that the
    one."""
    if isinstance(fact.get("sites"), list):
        return [str(site) for site in fact["sites"]]
    return [str(fact["site"])] if fact.get("site") and not fact.get("framework") else []


def _edit_configurations(found: Changes, facts: Facts, cwd: Path, knobs: Mapping[str, Any], *, check: bool) -> None:
    """check: whether the configuration that ran is to be that of the file."""
    configurations = {str(fact["path"]): fact for fact in facts.get("config", ()) if fact.get("path")}
    if not configurations:
        told = facts.get("config", ())
        sites = [str(fact["site"]) for fact in told if fact.get("site")]
        where = f" ({sites[0]})" if sites else ""
        for key, value in with_the_third(knobs, told[0].get("content") if told and check else None).items():
            found.left.append(f"{key}={json.dumps(value)}: the configuration is no file of its own{where}")
    for path, fact in configurations.items():
        if check:
            _check_same(cwd / path, fact.get("content"))
        try:
            together = with_the_third(knobs, _content(cwd / path))
        except CannotEdit as error:
            raise CannotEdit(f"{path}: {error}") from None
        for key, value in together.items():
            found.edit(cwd / path, partial(_set_value, key.split("."), value))


def _set_value(keys: Sequence[str], value: Any, text: str) -> str:
    return set_value(text, keys, value)


def _content(path: Path) -> Any:
    """Of a configuration's file; None of one with comments: what cannot be edited is told later. Raises OSError."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError:
        return None


def _check_same(path: Path, ran: Any) -> None:
    """Raises CannotEdit if a configuration is not the one that ran any more."""
    now = _content(path)
    if ran is not None and now is not None and not _equal(ran, now):
        raise CannotEdit(f"{path}: it has been edited since the run; run the job again, then fix that run")


def _equal(ran: Any, now: Any) -> bool:
    """Whether they are equal, but for what was redacted."""
    if isinstance(ran, Mapping) and isinstance(now, Mapping):
        return ran.keys() == now.keys() and all(_equal(ran[key], now[key]) for key in ran)
    return bool(ran == now) or (isinstance(ran, str) and REDACTED in ran)
