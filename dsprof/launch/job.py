"""What `dsprof run` is to start."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import dsprof
from dsprof.run import RunFolder

LOCAL_RANK: Final = "--local_rank=${local_rank}"
"""torchrun writes each rank's own number in the place of the second."""


class LaunchError(Exception):
    """The job cannot be started; the message says why and what to write instead. `status` is what to return."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Job:
    """What to run: a script or module by Python itself or under torchrun, or any other command as it is."""

    words: tuple[str, ...]
    """`train.py ARGS`, `-m pkg.train ARGS`, or the command."""
    is_command: bool = False
    is_program: bool = False
    """A script that torchrun starts without Python (--no-python)."""
    torchrun_flags: tuple[str, ...] | None = None
    """None: without torchrun, as `python train.py ARGS`."""
    world_size: int | None = None
    """How many ranks there will be, where it is known."""
    nnodes: str = ""
    """torchrun's number of hosts, or its range, where there may be several."""
    elastic: bool = False
    """A host may leave and come back (any rendezvous but the static one)."""
    local_rank: bool = False
    """Hand each rank's script `--local_rank=N`, as the deepspeed launcher does."""
    on_our_engine: bool = False
    """`import deepspeed` means dsprof's engine."""

    @property
    def has_ranks(self) -> bool:
        """Whether we start its ranks."""
        return self.torchrun_flags is not None

    @property
    def name(self) -> str:
        """What the run is called: the script's stem, the module, or the command."""
        if self.words[0] == "-m":
            return self.words[1]
        path = Path(self.words[0])
        return path.name if self.is_command else path.stem

    def check(self) -> None:
        """Raises LaunchError if there is nothing of that name to run."""
        first = self.words[0]
        if first == "-m":
            if len(self.words) < 2:
                raise LaunchError("-m: the name of a module must follow")
        elif self.is_command or self.is_program:
            if shutil.which(first) is None:
                raise LaunchError(f"{first}: no such command; give its path, or a name found in PATH", status=127)
        elif not Path(first).is_file():
            what = "is a folder" if Path(first).is_dir() else "no such file"
            raise LaunchError(f"{first}: {what}; give the path of a script, as seen from {Path.cwd()}")

    def command(self, folder: RunFolder, *, installed: bool) -> list[str]:
        """What to start: torchrun in our own agent, which learns how each rank ends, or nothing but the job."""
        if self.is_command:
            return list(self.words)
        if self.torchrun_flags is None:
            return [sys.executable, *self.words]
        # -P: nothing in the working directory may stand in for a module of ours or of Python's.
        program = [sys.executable, "-P", "-m", "dsprof.launch.torchrun"]
        if not installed:
            main = "from dsprof.launch.torchrun import main; sys.exit(main())"
            program[2:] = ["-c", f"import sys; sys.path.append({str(home())!r}); {main}"]
        script, arguments = self.words[:1], self.words[1:]
        if script == ("-m",):
            script, arguments = self.words[:2], self.words[2:]
        if self.local_rank:
            arguments = (LOCAL_RANK, *arguments)
        return [*program, str(folder.path), str(os.getpid()), "--", *self.torchrun_flags, "--", *script, *arguments]


def home() -> Path:
    """The folder that `dsprof` is imported from."""
    return Path(dsprof.__file__).parent.parent
