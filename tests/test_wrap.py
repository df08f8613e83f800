"""What dsprof puts around functions of torch is not to be seen in what those say to the user."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
from test_facts import code_of
from torch.utils.data import DataLoader

from dsprof.collectors.capture import facts
from dsprof.collectors.hooking.wrap import stands_for


def says(level: int) -> str:
    """Warn with that stack level."""
    warnings.warn("look", UserWarning, stacklevel=level)
    return "said"


def wrapped() -> Any:
    @stands_for(says)
    def wrapper(*args: Any) -> str:
        return says(*args)

    return wrapper


@pytest.mark.parametrize(("level", "file"), [(2, "/home/me/train.py"), (1, __file__)])
def test_a_warning_names_the_same_line(level: int, file: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = code_of("__main__", "/home/me/train.py", "\nanswer = function(level)\n", function=wrapped(), level=level)
    assert made["answer"] == "said"
    (warning,) = caught
    assert warning.filename == file
    if level == 2:
        assert warning.lineno == 2


def test_it_is_described_like_the_original() -> None:
    wrapper = wrapped()
    assert (wrapper.__name__, wrapper.__doc__) == ("says", "Warn with that stack level.")
    assert inspect.signature(wrapper) == inspect.signature(says)


def lines_of_warnings() -> list[tuple[str, int]]:
    text = "list(DataLoader([1, 2], pin_memory=True, num_workers=0))\nDataLoader([1, 2], num_workers=0, timeout=0)\n"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        code_of("__main__", "/home/me/train.py", text, DataLoader=DataLoader)
    return [(warning.filename, warning.lineno) for warning in caught]


def test_what_a_dataloader_warns_of_is_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    plain = lines_of_warnings()
    for cls in (DataLoader, _BaseDataLoaderIter):
        monkeypatch.setattr(cls, "__init__", cls.__init__)
    facts.watch_dataloaders()
    assert lines_of_warnings() == plain
    assert len(plain) >= 1
