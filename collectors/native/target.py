"""What a native helper is built for: one torch, one Python, one platform, and the helper's own sources."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from . import layout

SOURCES: Final = (Path(__file__).parent / "hooks.cpp", *sorted(Path(__file__).parent.glob("*.hpp")))
BUILT_FOR: Final = "built_for.json"
"""Lies beside each helper, so that what does not fit can be told without loading it."""


@dataclass(frozen=True)
class BuildTarget:
    """The torch and Python that a helper is built for."""

    torch_version: str
    torch_git: str
    torch_folder: str
    soabi: str
    """The interpreter's ABI tag, such as cpython-311-x86_64-linux-gnu."""
    include: str
    """The folder of Python.h."""

    @property
    def key(self) -> str:
        """Names the helper's folder: whatever would make another one unfit to load is part of it."""
        digest = hashlib.sha256()
        facts = (self.torch_version, self.torch_git, self.soabi, platform.machine(), layout.header())
        digest.update("\0".join((*facts, *self.definitions)).encode())
        for source in SOURCES:
            digest.update(source.read_bytes())
        return digest.hexdigest()[:20]

    @property
    def free_threaded(self) -> bool:
        """Whether that Python has no global interpreter lock."""
        return re.match(r"cpython-\d+d?t", self.soabi) is not None

    @property
    def definitions(self) -> tuple[str, ...]:
        """Of the preprocessor."""
        return (
            "USE_DISTRIBUTED",
            "NDEBUG",  # as torch's wheels: their headers would else look at members that only a debug build sets
            "_GLIBCXX_USE_CXX11_ABI=1",  # as every torch since 2.7
            f'DSPROF_TORCH_VERSION="{self.torch_version}"',
            f'DSPROF_TORCH_GIT="{self.torch_git}"',
        )


def running_target() -> BuildTarget:
    """The torch that this process has imported."""
    torch = sys.modules["torch"]
    return BuildTarget(
        torch_version=str(torch.__version__),
        torch_git=str(torch.version.git_version),
        torch_folder=str(Path(str(torch.__file__)).parent),
        soabi=str(sysconfig.get_config_var("SOABI")),
        include=sysconfig.get_paths()["include"],
    )


@dataclass(frozen=True)
class BuiltFor:
    """What BUILT_FOR says of the helper beside it. What is not known is empty."""

    key: str = ""
    torch_version: str = ""
    torch_git: str = ""
    soabi: str = ""
    machine: str = ""
    libc: str = ""
    """Of the machine that built it, such as `glibc 2.36`: it does not load where that is older."""
    compiler: str = ""
    compiler_version: str = ""
    warnings: tuple[str, ...] = ()
    """The compiler's flags about warnings."""

    @classmethod
    def of(cls, target: BuildTarget, *, compiler: str, compiler_version: str, warnings: tuple[str, ...]) -> BuiltFor:
        """What is to be said of a helper that is built here."""
        return cls(
            target.key, target.torch_version, target.torch_git, target.soabi, platform.machine(), libc(),
            compiler, compiler_version, warnings,
        )  # fmt: skip

    def write(self, folder: Path) -> None:
        """Raises OSError."""
        (folder / BUILT_FOR).write_text(json.dumps(asdict(self), indent=1))

    def why_not(self, target: BuildTarget, helper: Path) -> str | None:
        """Why `helper`, of which this is said, is not for `target`, in words; None: it is."""
        if self.key == target.key:
            return None
        if not self.key:
            return f"{helper} has no {BUILT_FOR} beside it, so nobody can tell what it was built for"
        pairs = (
            ("torch", self.torch_version, target.torch_version),
            ("torch of the git commit", self.torch_git, target.torch_git),
            ("the platform", self.machine, platform.machine()),
            ("Python of the ABI", self.soabi, target.soabi),
        )
        for what, theirs, ours in pairs:
            if theirs != ours:
                return f"{helper} was built for {what} {theirs}, and here it is {ours}"
        return f"{helper} was built by another version of dsprof"


def built_for(folder: Path) -> BuiltFor:
    """What is said of the helper in this folder. Never raises."""
    try:
        said: dict[str, Any] = json.loads((folder / BUILT_FOR).read_text())
        warnings = tuple(map(str, said.pop("warnings", ())))
        return BuiltFor(**{name: str(value) for name, value in said.items()}, warnings=warnings)
    except (OSError, ValueError, TypeError, AttributeError):
        return BuiltFor()


def libc() -> str:
    """Name and version of the C library, such as `glibc 2.36`; empty where it does not tell."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        return ""
