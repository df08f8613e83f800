"""`with dsprof.profile("name") as run:` profiles a part of a program in its own process: a cell, a loop."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dsprof.names import new_run_id
from dsprof.permissions import make_named_folder
from dsprof.redact import redact_words
from dsprof.run import DEFAULT_PARENT, RunError, RunFolder, RunInfo, now

from .loaded_run import Run

if TYPE_CHECKING:
    from dsprof.collectors.arming.in_process import CapturedBlock
    from dsprof.collectors.spans import span

LEVELS: Final = ("light", "full")


class ProfiledRun(Run):
    """The run of a block. It can be read when the block has ended; on several ranks, when it has ended on all of them.

    why: there is nothing to read, and why
    """

    def __init__(self, folder: RunFolder, why: str = "") -> None:
        super().__init__(folder)
        self.why = why

    def _need(self) -> None:
        if self.why:
            raise RunError(self.why)


class profile:
    """Profile a part of this program, which may be anything that trains: a cell, a loop, a call.

        with dsprof.profile("warm cache") as run:
            for batch in loader: ...
        run                                  # in a notebook: its verdict

    torch may be imported already, models and optimizers may be there already, and it may be done again. On several
    ranks every rank enters the same blocks in the same order; they agree on a run folder below `output`. In a program
    that is profiled as a whole (`dsprof run`), the block is a named span of that run and nothing else.

    What goes wrong with the profiler is a Python warning, and the block runs all the same.

    level: "light", or "full": every module and operation, which slows the program down
    """

    def __init__(self, name: str = "profile", *, output: str | os.PathLike[str] = DEFAULT_PARENT, level: str = "light"):
        if level not in LEVELS:
            raise ValueError(f"level={level!r}: write one of {', '.join(LEVELS)}")
        self.name = str(name)
        self.output = Path(output).absolute()
        self.level = level
        self._block: CapturedBlock | None = None
        self._span: span | None = None
        self._run: ProfiledRun | None = None
        self._info: RunInfo | None = None

    def __enter__(self) -> ProfiledRun:
        if self._run is not None:
            raise RuntimeError("this block was profiled already; make another dsprof.profile()")
        folder = RunFolder(self.output / new_run_id(self.name))
        self._run = ProfiledRun(folder, "the block is still running")
        try:
            self._begin(folder)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
        return self._run

    def _begin(self, folder: RunFolder) -> None:
        from dsprof.collectors.arming import in_process

        assert self._run is not None
        if in_process.captured_already():
            from dsprof.collectors.spans import span

            self._run.why = "this program is profiled as a whole: the block is a span of that run"
            self._span = span(self.name)
            self._span.__enter__()
            return
        self._block = in_process.begin(lambda: folder.path, {"DSPROF_LEVEL": self.level})
        if self._block is None:
            self._run.why = "DSPROF_RANKS leaves this rank out"
            return
        self._run.folder = RunFolder(self._block.folder)
        if self._block.founder:
            self._info = self._told(self._run.folder, self._block.who.world_size)

    def _told(self, folder: RunFolder, ranks: int) -> RunInfo:
        """run.json as it is while the block runs."""
        make_named_folder(folder.path)
        info = RunInfo(
            id=folder.path.name, name=self.name, command=redact_words([sys.argv[0] or "python", *sys.argv[1:]]),
            cwd=os.getcwd(), started=now(), world_size=ranks, level=self.level, versions=_versions(),
        )  # fmt: skip
        folder.write_info(info)
        return info

    def _give_up(self, why: str) -> None:
        assert self._run is not None
        self._run.why = f"it could not be profiled ({why})"
        warnings.warn(f"dsprof: {self._run.why}; the block runs all the same", RuntimeWarning, stacklevel=3)

    def __exit__(self, kind: type[BaseException] | None, *exc: Any) -> None:
        if self._span is not None:
            self._span.__exit__(kind, *exc)
        if self._block is None or self._run is None:
            return
        try:
            self._block.end()
            self._run.why = ""
            if self._info is not None:
                self._info.ended = now()
                if kind is not None:
                    self._info.hints = [f"the block ended with {kind.__name__}"]
                else:
                    self._info.status = 0
                self._run.folder.write_info(self._info)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            with suppress(Exception):
                self._run.reload()


def _versions() -> dict[str, str]:
    """Of what matters to a trace."""
    found = {"python": platform.python_version()}
    for name in ("dsprof", "torch"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
