"""Other tools' traces as runs of dsprof: a file a format, which is told by content.

    join.py             what several tools recorded of one job, as one trace
    straggler.py        tables of 'Understanding Stragglers in Large Model Training Using What-if Analysis' (OSDI '25);
                        straggler_table.py reads and checks them
    memory_snapshot.py  CUDA memory snapshots of torch.cuda.memory._dump_snapshot (read by dsprof.trace.snapshot), one
                        file a rank
    kineto.py           traces of torch.profiler, one file a rank
    mapped.py           any Chrome trace, by a mapping file (mapping.py; those that come with dsprof are in mappings/);
                        mapped_values.py reads its events' values, search_limit.py ends patterns that take for ever,
                        mapped_rows.py finishes its rows
    own_export.py       what `dsprof export` wrote
    chakra.py           Chakra execution traces, one a rank
    lacks.py            what a trace lacks, for which rules, and how to record it the next time
    nsight.py           Nsight Systems reports, exported to SQLite; a rank a process
    flight_recorder.py  what each rank had issued and not seen end (torch's Flight Recorder), a file a rank

A format's module has a DESCRIPTION, `recognizes(path)`, which looks at one file and never raises, and `read(path)`, its
`Trace`; what is wrong with the file is a RunError that says what, where, and what to write instead. All but tables may
be several, one a rank (rank_names.py: which rank, by a file's name). sources.py finds the files that folders, patterns
and archives (archive.py) stand for; row_table.py and assemble.py make rows and run.json of what an importer read.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final, Protocol, cast

from dsprof.names import new_run_id
from dsprof.run import RunError, RunFolder, open_run
from dsprof.trace import Trace, load
from dsprof.trace.kineto import head_of

from .join import PROFILERS, join_traces
from .mapping import EventMapping, load_mapping
from .sources import find_files

FORMATS: Final = (
    "own_export", "straggler", "memory_snapshot", "flight_recorder", "nsight", "chakra", "mapped", "kineto",
)  # fmt: skip
"""The first that recognizes a file reads it."""
SEVERAL: Final = frozenset({"memory_snapshot", "flight_recorder", "mapped", *PROFILERS})
"""Formats of which there may be several files, one a rank."""
MOST_NAMED: Final = 8
"""Files of a folder that are named, of those one could mean."""


class Format(Protocol):
    """What the module of a format has."""

    DESCRIPTION: str

    def recognizes(self, path: Path) -> bool: ...

    def read(self, path: Path) -> Trace: ...


def import_trace(paths: Path | Sequence[Path], comm_kernels: Sequence[str] = (), mapping: str = "") -> Trace:
    """The trace in a file, or, of a format whose files are one a rank, in all that `paths` stand for: files, folders,
    patterns, tar archives. `comm_kernels`: see `kineto.read`. `mapping`: a mapping file, or the name of one that comes
    with dsprof, by which all of them are read. Raises RunError."""
    given = [paths] if isinstance(paths, Path) else list(paths)
    try:
        room = tempfile.TemporaryDirectory(prefix="dsprof-import-")
    except OSError as error:
        raise RunError(f"no folder for temporary files can be made ({error.strerror}); set TMPDIR") from error
    with room as name:
        return _imported(given, Path(name), comm_kernels, mapping)


def _imported(given: list[Path], room: Path, comm_kernels: Sequence[str], mapping: str) -> Trace:
    by_mapping = load_mapping(mapping) if mapping else None
    formats = {name: cast(Format, importlib.import_module(f".{name}", __name__)) for name in FORMATS}

    @cache
    def kind_of(path: Path) -> str:
        """The format that reads a file; empty: none does."""
        if by_mapping:
            return "mapped" if head_of(path) else ""
        return next((name for name, one in formats.items() if one.recognizes(path)), "")

    where = ", ".join(map(str, given[:MOST_NAMED])) + (", ..." if len(given) > MOST_NAMED else "")
    runs = [path for path in given if path.is_dir() and RunFolder(path).is_run()]
    if len(runs) > 1 or len(runs) == len(given):
        raise RunError(f"{where}: a run of dsprof's already; name beside it what other tools recorded of its job")
    captured = [load(open_run(path)) for path in runs]
    given_files = [path for path in given if path not in runs]
    sources = find_files(given_files, room, lambda path: bool(kind_of(path)))
    by_kind: dict[str, list[Path]] = {}
    for file in sources.files:
        by_kind.setdefault(kind_of(file), []).append(file)
    if "" in by_kind or not by_kind:
        strange = by_kind[""][0] if by_kind else None
        about = strange if strange is not None else where
        can = "; ".join(formats[name].DESCRIPTION for name in [*FORMATS[1:], FORMATS[0]])  # our own last
        raise RunError(f"{about}: {_what(given, strange, sources.looked_at)}; what can be imported is {can}")
    if comm_kernels and not by_kind.keys() & PROFILERS:
        raise RunError(
            f"{where}: no trace of torch.profiler or Nsight Systems, which --comm-kernels is for; leave the flag out"
        )
    if any(len(of_kind) > 1 and kind not in SEVERAL for kind, of_kind in by_kind.items()):
        names = ", ".join(file.name for file in sources.files[:MOST_NAMED])
        more = ", ..." if len(sources.files) > MOST_NAMED else ""
        raise RunError(f"{where}: holds {len(sources.files)} traces ({names}{more}); name one of them")
    traces, refused = list(captured), list[RunError]()
    for kind, of_kind in by_kind.items():
        named = given[0] if len(given) == 1 and given[0].exists() else _named_after(of_kind)
        try:
            traces.append(_read(kind, of_kind, named, where, comm_kernels, by_mapping))
        except RunError as error:
            refused.append(error)
    if not traces or (captured and len(traces) == 1):
        raise refused[0]
    trace = join_traces(traces) if len(traces) > 1 else traces[0]
    left_out = [f"left out: {error}" for error in refused]
    told = next((fact for fact in trace.run.facts if fact.get("fact") in ("import", "joined")), None)
    if told is not None:
        told["warnings"] = [*told.get("warnings", []), *sources.notes, *left_out]
    command = ["dsprof", "import", *map(str, given)]
    run = replace(trace.run, command=command) if not captured else replace(trace.run, id=new_run_id(trace.run.name))
    return replace(trace, run=run)


def _read(
    kind: str, files: list[Path], named: Path, where: str, comm_kernels: Sequence[str], mapping: EventMapping | None
) -> Trace:
    """`named`: what the run is called after. `where`: what was typed, for what is wrong with it."""
    from . import chakra, flight_recorder, kineto, mapped, memory_snapshot, nsight, own_export, straggler

    named = named if len(files) > 1 else files[0]
    if kind == "mapped":
        chosen = mapping or mapped.mapping_for(files[0])
        if chosen is None:  # somebody changed the file meanwhile
            raise RunError(f"{files[0]}: no trace that a mapping of dsprof's own is for; name one with --mapping")
        return mapped.read_all(files, named, chosen)
    if kind in PROFILERS:
        read_all = {"kineto": kineto.read_all, "nsight": nsight.read_all, "chakra": chakra.read_all}[kind]
        return read_all(files, named, where, comm_kernels)
    if kind == "memory_snapshot":
        return memory_snapshot.read_all(files)
    if kind == "flight_recorder":
        return flight_recorder.read_all(files)
    return own_export.read(files[0]) if kind == "own_export" else straggler.read(files[0])


def _named_after(files: list[Path]) -> Path:
    """The folder that several files lie in, if it is one."""
    return files[0].parent if len({file.parent for file in files}) == 1 else files[0]


def _what(given: list[Path], strange: Path | None, looked_at: int) -> str:
    """Why there is nothing to import, of what no format recognizes."""
    if strange is not None:
        return "not a trace that dsprof knows" if strange.stat().st_size else "an empty file"
    if len(given) == 1 and given[0].is_dir():
        return f"none of its {looked_at} files is a trace that dsprof knows" if looked_at else "an empty folder"
    return "holds no trace that dsprof knows"
