"""What a collector installs, part by part: one that fails costs what it alone records, which is told in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from . import private
from .errors import count_error, describe
from .uninstall import Uninstall, in_reverse


class HookPart(NamedTuple):
    """lost: what a user does not have without it, in a sentence; install: gives what takes it away again, if there is
    anything to take; decisive: without it the collector is as good as switched off."""

    lost: str
    install: Callable[[], Uninstall | None]
    decisive: bool = False


def install_each(collector: str, parts: Iterable[HookPart], failed: list[Exception] | None = None) -> list[Uninstall]:
    """Install each part by itself; `failed` takes the errors. Raises only what is a signal handler's of the job."""
    uninstalls = []
    for part in parts:
        try:
            uninstall = part.install()
        except Exception as error:
            count_loss(collector, part.lost, error, part.decisive)
            if failed is not None:
                failed.append(error)
        else:
            if uninstall is not None:
                uninstalls.append(uninstall)
    return uninstalls


def count_loss(collector: str, lost: str, error: Exception, decisive: bool) -> None:
    """Count an error of an install, and state in words what is lost: what the table says of a private name that is
    gone, else `lost`. Raises what is a signal handler's of the job."""
    count_error(f"installing {collector}", error)
    if not private.told_of(error):
        private.lost((collector,), lost, describe(error), decisive)


def in_parts(collector: str, parts: Iterable[HookPart]) -> Uninstall:
    """The same, with one function that takes all of them away, the last first."""
    return in_reverse(install_each(collector, parts))
