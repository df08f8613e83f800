"""From a file or a dict to a `Config`: keys, values, contradictions, batch sizes, in this order.

At the end: what one key does, and which values it takes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from dsprof.words import joined

from . import batch
from .cases import without_effect
from .config import Config, replicas_of
from .keys import Notes, complaints, known_keys, wanted
from .model import Section, as_section, shown
from .rules import RULES, share_of_a_sample


class ConfigError(ValueError):
    """A configuration that cannot be used. The message has every problem, one a line."""

    def __init__(self, problems: list[str], warnings: list[str] | None = None, source: Path | None = None) -> None:
        self.problems = problems
        """Each begins with the key it is about."""
        self.warnings = warnings or []
        """What else there is to say."""
        self.source = source
        """The file."""
        prefix = "" if source is None else f"{source}: "
        super().__init__("\n".join(f"{prefix}{problem}" for problem in problems))

    def __reduce__(self) -> tuple[Any, ...]:
        """For the way from one process to another."""
        return ConfigError, (self.problems, self.warnings, self.source)


def load(
    source: Mapping[str, Any] | str | Path | None, *, world_size: int = 1, pipeline_stages: int | None = None
) -> Config:
    """The configuration in a dict or in a JSON file, for a job of `world_size` ranks; None is an empty one.

    `pipeline_stages` is what the model itself says of them, 0 that it is no pipeline; None leaves it to the
    configuration.
    What is to be known of it, but is no error, is in `Config.warnings`. Raises ConfigError.
    """
    path = Path(source) if isinstance(source, (str, Path)) else None
    notes = Notes()
    try:
        raw = read(path) if path is not None else source if source is not None else {}
        if not isinstance(raw, Mapping):
            raise ConfigError([f"{shown(raw)} is not a configuration; write an object of keys and values"])
    except ConfigError as error:
        raise ConfigError(error.problems, source=path) from None
    config = _validated(known_keys(raw, Config, notes), notes)
    if pipeline_stages is not None:
        config = _with_stages(config, pipeline_stages, notes)
    for remark in (remark for rule in RULES for remark in rule(config, world_size)):
        (notes.problems if remark.error else notes.warnings).append(str(remark))
    sharing = config.tensor_parallel.size * config.pipeline.stages * config.sequence_parallel_size
    if world_size % sharing == 0:
        config = _with_batch_sizes(config, replicas_of(config, world_size), notes)
    if notes.problems:
        raise ConfigError(notes.problems, notes.warnings, path)
    config.warnings.extend(notes.warnings)
    return config


def as_far_as_known(source: Mapping[str, Any]) -> Config:
    """What this engine knows of a configuration that runs, perhaps DeepSpeed's: what else is in it is passed over, and
    so is `"auto"`. Its batch sizes are not solved."""
    notes = Notes()
    return _validated(known_keys(source, Config, notes), notes)


def _validated(values: dict[str, Any], notes: Notes) -> Config:
    """The configuration without what cannot be taken, so that the rest is still looked at."""
    left_out: set[tuple[str, ...]] = set()
    while True:
        try:
            return Config.model_validate(values)
        except ValidationError as error:
            for keys, says, missing in list(complaints(error, Config, values)):  # before any is left out
                if keys not in left_out:  # else it is missing because it was wrong
                    notes.problems.append(f"{joined(*keys)}: {says}")
                left_out.add(keys)
                _leave_out(values, keys[:1] if missing else keys)


def _leave_out(values: dict[str, Any], keys: Sequence[str]) -> None:
    """Take away what is under `keys`, or as far along them as there is anything."""
    key, *rest = keys
    if rest and isinstance(values.get(key), dict) and rest[0] in values[key]:
        _leave_out(values[key], rest)
    else:
        values.pop(key, None)


def _with_stages(config: Config, stages: int, notes: Notes) -> Config:
    """The configuration with the model's number of pipeline stages, which it must not contradict."""
    pipeline = config.pipeline
    if stages == 0:
        keys = [key for key in type(pipeline).model_fields if key != "stages"]
        remarks = without_effect(pipeline, "pipeline", keys, "the model is not a PipelineModule")
        notes.warnings.extend(map(str, remarks))
    if pipeline.stages == max(1, stages):
        return config
    if "stages" in pipeline.model_fields_set:
        not_one = "the model is not a pipeline; wrap it, PipelineModule(layers, loss_fn=...), or write 1"
        other = f"the PipelineModule has num_stages={stages}; write {stages}, or leave one of them out"
        notes.problems.append(f"pipeline.stages: {pipeline.stages}, and {other if stages else not_one}")
    return config.model_copy(update={"pipeline": pipeline.model_copy(update={"stages": max(1, stages)})})


def _with_batch_sizes(config: Config, ranks: int, notes: Notes) -> Config:
    """The configuration with its batch sizes solved."""
    keys, speeds = (batch.TRAIN, batch.MICRO, batch.ACCUMULATION), config.heterogeneous.speeds
    if any(problem.startswith(f"{key}: ") for key in keys for problem in notes.problems):
        return config  # what is missing is said already
    try:
        found = batch.solve(
            config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps, ranks,
            unequal=speeds is not None,
        )  # fmt: skip
    except batch.BatchError as error:
        notes.problems.append(str(error))
        return config
    config = config.model_copy(update=dict(zip(keys, (found.train, found.micro, found.accumulation), strict=True)))
    if not any(problem.startswith("heterogeneous") for problem in notes.problems):
        notes.problems.extend(map(str, share_of_a_sample(config)))
    return config


def read(path: Path) -> Any:
    """What a JSON file holds. Raises ConfigError."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_without_duplicates)
    except tuple(_UNREADABLE) as error:
        says = next(says for kind, says in _UNREADABLE.items() if isinstance(error, kind))
        raise ConfigError([says(error)]) from None


_UNREADABLE: Final[Mapping[type[Exception], Callable[[Any], str]]] = {
    FileNotFoundError: lambda error: "no such file; name the JSON file of the configuration",
    IsADirectoryError: lambda error: "is a folder; name the JSON file of the configuration",
    UnicodeDecodeError: lambda error: f"byte {error.start} is not UTF-8; save it as UTF-8",
    OSError: lambda error: f"cannot be read ({error.strerror})",
    json.JSONDecodeError: lambda error: f"line {error.lineno}, column {error.colno}: {_syntax(error)}",
    RecursionError: lambda error: "nested too deeply to be a configuration",
}
"""What may be raised where a configuration is read -> what is said of it."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]
    if twice:
        raise ConfigError([f"{key}: written twice in one object; remove one of them" for key in twice])
    return dict(pairs)


def _syntax(error: json.JSONDecodeError) -> str:
    """What is not JSON about the place where reading stopped."""
    rest, before = error.doc[error.pos :], error.doc[: error.pos].rstrip()
    if not error.doc.strip():
        return "the file is empty; write an object of keys and values"
    if rest[:1] in ("/", "#"):
        return "JSON has no comments; remove it"
    if rest[:1] == "'":
        return "strings take double quotes"
    if rest[:1] == "," or (rest[:1] in ("}", "]") and before.endswith(",")):
        return "a comma too many; remove it"
    for python, right in (("True", "true"), ("False", "false"), ("None", "null")):
        if rest.startswith(python):
            return f"{python} is Python; write {right}"
    return f"not JSON: {error.msg[:1].lower()}{error.msg[1:]}"


# --- One key of a configuration by itself: what it does, what it takes, and whether it takes a value


OPEN: Final = ("optimizer.type", "scheduler.type")
"""Keys that DeepSpeed takes more values of than this engine does."""


def field_of(path: str) -> FieldInfo | None:
    """The field of a key, such as `zero_optimization.stage`; None for one that only DeepSpeed has, and in sections
    whose keys depend on a type."""
    model: type[Section] | None = Config
    field: FieldInfo | None = None
    for key in path.split("."):
        if model is None or key not in model.model_fields:
            return None
        field = model.model_fields[key]
        model = as_section(field.annotation)
    return field


def key_says(path: str) -> str:
    """What a key does, as its documentation has it; empty where it is not one of `Config`."""
    field = field_of(path)
    return "" if field is None else " ".join((field.description or "").split())


def key_takes(path: str) -> str:
    """What a key takes, in words, such as `a whole number above 0`."""
    field = field_of(path)
    return "a JSON value" if field is None else wanted(field)


def key_can_be(path: str, value: Any) -> bool:
    """Whether a key takes a value.

    What is not known here is taken: keys that only DeepSpeed has, the keys of a section that is given whole, names of
    optimizers and schedules, `"auto"`, which Hugging Face's Trainer fills in, and null, which is a key's default.
    """
    field = field_of(path)
    if field is None or path in OPEN or value is None or value == "auto":
        return True
    if as_section(field.annotation) is not None:
        return isinstance(value, Mapping)
    keys = tuple(path.split("."))
    content: Any = value
    for key in reversed(keys):
        content = {key: content}
    try:
        Config.model_validate(content)
    except ValidationError as error:
        return all(found != keys for found, _, _ in complaints(error, Config, content))
    return True
