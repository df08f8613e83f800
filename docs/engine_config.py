"""docs/engine-config.md, made from the models: `python docs/engine_config.py > docs/engine-config.md`."""

from __future__ import annotations

from typing import Any, Final

from dsprof.engine.config import Config
from dsprof.engine.config.deepspeed_keys import FOREIGN, RENAMED, REPLACED
from dsprof.engine.config.keys import wanted
from dsprof.engine.config.model import Section, TorchParams, as_section, sections, shown
from dsprof.words import joined

HEAD: Final = """\
# The engine's configuration

`dsprof.engine` reads DeepSpeed's JSON, as of DeepSpeed 0.19. This page is made from the models in `engine/config/`
(`python docs/engine_config.py`); a test holds it to them. `dsprof doctor ds.json` checks a file without
training, and prints what it means with all defaults filled in.

- Numbers may be written `5e8`, or as strings; Hugging Face's `"auto"` may not: give the value.
- An unknown key is an error that names the nearest one. A key of DeepSpeed's that the engine does not have is an error
  where the training would not be what was asked for, and a warning where it has no effect: both are listed at the end.
- DeepSpeed lets comments in its files pass; JSON has none.
"""

FOREIGN_HEAD: Final = """\
## Keys of DeepSpeed's that are not here

An *error* unless it is switched off, or only a *warning* that it has no effect.
"""

RENAMED_HEAD: Final = """\
## Other names

They work, with a warning.
"""


def render() -> str:
    """The page, in Markdown."""
    parts = [HEAD, *(_section(where, section) for where, section in sections(Config) if not _of_torch(section))]
    return "\n".join([*parts, FOREIGN_HEAD, _foreign(), RENAMED_HEAD, _renamed()])


def _of_torch(section: type[Section]) -> bool:
    return issubclass(section, TorchParams)


def _section(where: str, section: type[Section]) -> str:
    name = section.__name__.removesuffix("Params")
    title = "The top" if not where else f"`{where}` of {name}" if where.endswith(".params") else f"`{where}`"
    rows = [
        f"| `{key}` | {_takes(section, key)} | {_default(section, key)} | {_line(field.description)} |"
        for key, field in section.model_fields.items()
    ]
    table = "\n".join(["| key | takes | default | what it does |", "|---|---|---|---|", *rows])
    return f"## {title}\n\n{_line(section.__doc__)}\n\n{table}\n"


def _takes(section: type[Section], key: str) -> str:
    if section.sections_under(key):
        return "a section, below"
    return _cell(wanted(section.model_fields[key]))


def _default(section: type[Section], key: str) -> str:
    field = section.model_fields[key]
    if field.is_required():
        return "needed"
    if field.default is None or as_section(field.annotation) or section.sections_under(key):
        return ""
    return f"`{_number(field.default)}`"


def _number(value: Any) -> str:
    """Large round numbers as one would write them: 5e8."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000:
        digits = str(value).rstrip("0")
        if len(digits) == 1:
            return f"{digits}e{len(str(value)) - 1}"
    return shown(value)


def _foreign() -> str:
    rows = [
        f"| `{joined(where, key)}` | {'error' if foreign.refused else 'warning'} | {_cell(foreign.says)} |"
        for where, keys in FOREIGN.items()
        for key, foreign in sorted(keys.items())
    ]
    return "\n".join(["| key | | what is said |", "|---|---|---|", *rows, ""])


def _renamed() -> str:
    pairs = [(joined(where, old), f"`{new}`") for where, names in RENAMED.items() for old, new in names.items()]
    pairs += [
        (joined(where, old), f'`"{new}": {{"device": "cpu"}}`')
        for where, names in REPLACED.items()
        for old, new in names.items()
    ]
    return "\n".join(["| written | means |", "|---|---|", *(f"| `{old}` | {new} |" for old, new in pairs), ""])


def _line(text: str | None) -> str:
    """A docstring in one line."""
    return _cell(" ".join((text or "").split()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(render(), end="")
