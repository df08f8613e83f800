"""Other tools' traces as runs of dsprof: a file a format, which is told by content.

    straggler.py        tables of 'Understanding Stragglers in Large Model Training Using What-if Analysis' (OSDI '25);
                        straggler_table.py reads and checks them
    memory_snapshot.py  CUDA memory snapshots of torch.cuda.memory._dump_snapshot (read by dsprof.trace.snapshot), one
                        file a rank
    kineto.py           traces of torch.profiler, one file a rank
    mapped.py           any Chrome trace, by a mapping file (mapping.py; those that come with dsprof are in mappings/);
                        mapped_rows.py finishes its rows
    flight_recorder.py  what each rank had issued and not seen end (torch's Flight Recorder), a file a rank

A format's module has a DESCRIPTION, `recognizes(path)`, which looks at one file and never raises, and `read(path)`, its
`Trace`; what is wrong with the file is a RunError that says what, where, and what to write instead. All but tables may
be several, one a rank (rank_names.py: which rank, by a file's name). sources.py finds the files that folders, patterns
and archives (archive.py) stand for.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol, cast

from dsprof.run import RunError
from dsprof.trace import Trace
from dsprof.trace.kineto import head_of

from .mapping import EventMapping, load_mapping
from .sources import find_files

FORMATS: Final = ("straggler", "memory_snapshot", "flight_recorder", "mapped", "kineto")
"""The first that recognizes a file reads it."""
SEVERAL: Final = frozenset({"memory_snapshot", "flight_recorder", "mapped", "kineto"})
"""Formats of which there may be several files, one a rank."""
MOST_NAMED: Final = 8
"""Files of a folder that are named, of those one could mean."""


class Format(Protocol):
    """What the module of a format has."""

    DESCRIPTION: str
    __name__: str

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
    formats = [cast(Format, importlib.import_module(f".{name}", __name__)) for name in FORMATS]

    def known(path: Path) -> bool:
        return bool(head_of(path)) if by_mapping else any(one.recognizes(path) for one in formats)

    where = ", ".join(map(str, given[:MOST_NAMED])) + (", ..." if len(given) > MOST_NAMED else "")
    sources = find_files(given, room, known)
    mapped = [one for one in formats if one.__name__.endswith(".mapped")]
    of_file = [
        (file, (mapped if head_of(file) else []) if by_mapping else [one for one in formats if one.recognizes(file)])
        for file in sources.files
    ]
    strange = next((file for file, of in of_file if not of), None)
    if strange is not None or not of_file:
        about = strange if strange is not None else where
        can = "; ".join(each.DESCRIPTION for each in formats)
        raise RunError(f"{about}: {_what(given, strange, sources.looked_at)}; what can be imported is {can}")
    kinds = {of[0].__name__.rpartition(".")[2] for _, of in of_file}
    files = [file for file, _ in of_file]
    if comm_kernels and kinds != {"kineto"}:
        raise RunError(f"{where}: no trace of torch.profiler, which --comm-kernels is for; leave the flag out")
    several = len(kinds) == 1 and kinds <= SEVERAL
    if len(files) > 1 and not several:
        names = ", ".join(file.name for file in files[:MOST_NAMED]) + (", ..." if len(files) > MOST_NAMED else "")
        raise RunError(f"{where}: holds {len(files)} traces ({names}); name one of them")
    trace = _read(
        kinds.pop(),
        files,
        given[0] if len(given) == 1 and given[0].exists() else _named_after(files),
        where,
        comm_kernels,
        by_mapping,
    )
    told = next((fact for fact in trace.run.facts if fact.get("fact") == "import"), None)
    if told is not None:
        told["warnings"] = [*told.get("warnings", []), *sources.notes]
    return replace(trace, run=replace(trace.run, command=["dsprof", "import", *map(str, given)]))


def _read(
    kind: str, files: list[Path], named: Path, where: str, comm_kernels: Sequence[str], mapping: EventMapping | None
) -> Trace:
    """`named`: what the run is called after. `where`: what was typed, for what is wrong with it."""
    from . import flight_recorder, kineto, mapped, memory_snapshot, straggler

    if kind == "mapped":
        chosen = mapping or mapped.mapping_for(files[0])
        if chosen is None:  # somebody changed the file meanwhile
            raise RunError(f"{files[0]}: no trace that a mapping of dsprof's own is for; name one with --mapping")
        return mapped.read_all(files, named if len(files) > 1 else files[0], chosen)

    if kind == "kineto":
        return kineto.read_all(files, named if len(files) > 1 else files[0], where, comm_kernels)
    if kind == "flight_recorder":
        return flight_recorder.read_all(files)
    return memory_snapshot.read_all(files) if kind == "memory_snapshot" else straggler.read(files[0])


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
