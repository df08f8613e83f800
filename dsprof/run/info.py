"""run.json: what a run was, and how it ended."""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, TypeVar

from ..redact import redact_words
from ..regular_files import parse_json
from .ranks import RankExit, RankInfo

RUN_SCHEMA: Final = 1
MOST_RANKS: Final = 1 << 20
LARGEST_NUMBER: Final = 2**63

Known = TypeVar("Known")


def now() -> str:
    """UTC, for run.json."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


@dataclass
class HostPart:
    """What a host's launcher says of its part in a run of several hosts: hosts/<host>.json."""

    host: str
    node: int | None = None
    """Its number in the job's rendezvous; that of the host of rank 0 is 0. None: the hosts have not met yet."""
    ended: str | None = None
    """When its job ended and its captures were in the run folder; UTC."""
    status: int | None = None
    """What its `dsprof run` returned."""
    concluded: bool = False
    """It has drawn the run's verdict."""
    cpu_peaks: list[dict[str, Any]] = field(default_factory=list)
    """What it measured for `RunInfo.cpu_peaks`, of its own ranks."""


@dataclass
class RunInfo:
    """The contents of run.json."""

    id: str
    name: str
    command: list[str]
    cwd: str = ""
    started: str = ""
    ended: str | None = None
    status: int | None = None
    """What `dsprof run` returned; None while running or without a launcher of ours."""
    world_size: int | None = None
    level: str = "light"
    """Of the capture; empty of an imported trace, which has none of ours."""
    engine: str = "script"
    """What trained: `script`, what the script imports, or `dsprof`, our engine in the place of DeepSpeed."""
    knobs: dict[str, Any] = field(default_factory=dict)
    """What `dsprof run --set` asked for, by key."""
    verified: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By the code of a finding, what `dsprof fix --verify` measured of its fix: `set` (knobs), `outcome`; `ms`, `low`,
    `high`, `percent`, `pairs` (ms a step, original and changed); of a trial that failed `why`."""
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    """What was checked out of the job's own repository when it began; empty: it lies in none, or it is not known."""
    exits: list[RankExit] = field(default_factory=list)
    ranks: list[RankInfo] = field(default_factory=list)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Process group name -> {"ranks": [global ranks seen], "size": int, "desc": str, "backend": str, if known}."""
    facts: list[dict[str, Any]] = field(default_factory=list)
    """What the ranks said of themselves: {"fact": "ddp"|"dataloader"|..., "rank": int, "site": "file:line", ...}."""
    warnings: list[str] = field(default_factory=list)
    host: str = ""
    """The launcher's host."""
    started_ns: int | None = None
    """Just before the job was started, by the monotonic clock of `host`; None without a launcher of ours."""
    ended_ns: int | None = None
    """Just after it had ended."""
    cpu_peaks: list[dict[str, Any]] = field(default_factory=list)
    """Measured on each host when a job on CPUs had ended, at level full: {"host": str, "ranks": [global ranks],
    "threads": int, "flops": {dtype: operations a second}}."""
    oom_kills: list[dict[str, Any]] = field(default_factory=list)
    """Seen when the job had ended: {"ranks": [global ranks], "path": cgroup, "kills": processes of it that the kernel
    killed for want of memory while the job ran}."""
    nnodes: str = ""
    """Of a run of several hosts how many, as torchrun's flag says it: `2`, `1:4`. Empty: of one."""
    token: str = ""
    """Tells such a run from others that are made in the same folder."""
    hangs: list[dict[str, Any]] = field(default_factory=list)
    """The times that the launcher called the job hung (hangs.json): {"code", "kind", "words", "culprits", "waiters",
    "operation", "still_s", "went_on", "stood_s" of one that went on, "aborted", ...}; see `dsprof.launch.watch`."""
    hints: list[str] = field(default_factory=list)
    """Of a job that failed or was interrupted, and wanted to be started in another way: what to type instead."""
    schema: int = RUN_SCHEMA

    @property
    def imported(self) -> str:
        """The format of another tool's trace that this run was made of; empty: dsprof captured it."""
        return next((str(fact.get("format", "")) for fact in self.facts if fact.get("fact") == "import"), "")

    def facts_by_kind(self) -> dict[str, list[dict[str, Any]]]:
        """`facts` by their kind."""
        found: dict[str, list[dict[str, Any]]] = {}
        for fact in self.facts:
            found.setdefault(str(fact.get("fact")), []).append(fact)
        return found

    @property
    def ended_for_hanging(self) -> bool:
        """Whether dsprof ended the job since it hung, as `--on-hang abort` says."""
        return any(hang.get("aborted") and not hang.get("went_on") for hang in self.hangs[-1:])

    def group(self, name: str) -> dict[str, Any]:
        """What `groups` says of a process group, or of one made anew under its name (`0#1`); empty: nothing."""
        return self.groups.get(name) or self.groups.get(name.partition("#")[0]) or {}

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> RunInfo:
        """Raises ValueError, TypeError or AttributeError where it is no run.json that dsprof can have written."""
        data = parse_json(text)
        if not isinstance(data, dict) or "id" not in data:
            raise ValueError("not a run.json: it has no `id`")
        data["exits"] = [from_known(RankExit, item) for item in data.get("exits", [])]
        data["ranks"] = [from_known(RankInfo, item) for item in data.get("ranks", [])]
        info = from_known(cls, {"name": data["id"], "command": [], **data})
        info.command = redact_words(info.command)  # of a dsprof that did not yet
        return info


def from_known(kind: type[Known], item: dict[str, Any]) -> Known:
    """A dataclass from JSON, without keys that it does not know: a newer dsprof may have written more.

    Raises TypeError or AttributeError where it is not an object that holds what is needed, each of its type.
    """
    known = {entry.name: str(entry.type) for entry in fields(kind)}  # type: ignore[arg-type]
    for name, value in item.items():
        if name in known and not _fits(value, known[name]):
            raise TypeError(f"its `{name}` is no {known[name].removesuffix(' | None')}")
        if name in ("rank", "world_size") and isinstance(value, int) and not 0 <= value <= MOST_RANKS:
            raise TypeError(f"its `{name}` is {str(value)[:20]}, which no job has")
    return kind(**{key: value for key, value in item.items() if key in known})


def _fits(value: Any, annotation: str) -> bool:
    """Whether a value from JSON is of the type that an annotation of a field names."""
    if " | " in annotation:
        return any(_fits(value, part) for part in annotation.split(" | "))
    outer, _, inside = annotation.removesuffix("]").partition("[")
    if outer == "int":
        return type(value) is int and -LARGEST_NUMBER <= value < LARGEST_NUMBER
    if outer == "list":
        return isinstance(value, list) and all(_fits(one, inside) for one in value)
    if outer == "dict":
        return isinstance(value, dict) and all(_fits(one, inside.partition(", ")[2]) for one in value.values())
    # `exits` and `ranks` hold what was made of their entries before.
    plain = {"str": str, "bool": bool, "None": type(None), "RankExit": RankExit, "RankInfo": RankInfo}
    return isinstance(value, plain.get(outer, object))
