"""Where something was made, and whether a framework made it on the user's behalf."""

from __future__ import annotations

import contextlib
import itertools
import os
import sysconfig
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from dsprof.collectors.capture import facts
from dsprof.collectors.capture.facts import LOADER, Fact
from dsprof.collectors.hooking import statements
from dsprof.collectors.hooking.caller import caller


def code_of(name: str, file: str, text: str, **known: Any) -> dict[str, Any]:
    """The module `name` in `file`."""
    module: dict[str, Any] = {"__name__": name, **known}
    exec(compile(text, file, "exec"), module)
    return module


@pytest.fixture
def stated(monkeypatch: pytest.MonkeyPatch) -> list[Fact]:
    """The facts that the test states; what it watches is let go of afterwards."""
    found: list[Fact] = []
    monkeypatch.setattr(statements, "_sink", found.append)
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    for cls in (DataLoader, _BaseDataLoaderIter):
        monkeypatch.setattr(cls, "__init__", cls.__init__)
    monkeypatch.setattr(facts, "_numbers", itertools.count(1))
    facts.watch_dataloaders()
    return found


CALL = "def call(inner):\n    return inner()\n"


@pytest.mark.parametrize(
    ("modules", "framework"),
    [
        ([], None),
        ([("accelerate.data_loader", "/x/site-packages/accelerate/data_loader.py")], "accelerate"),
        ([("pytorch_lightning.trainer", "/x/lightning/trainer.py")], "lightning"),  # installed from its source
        (
            [("accelerate.accelerator", "/x/site-packages/accelerate/a.py"),
             ("transformers.trainer", "/x/site-packages/transformers/t.py")],
            "transformers",
        ),
        ([("somebody.helpers", "/x/site-packages/somebody/helpers.py")], None),
    ],
)  # fmt: skip
def test_the_outermost_framework_before_the_users_code(modules: list[tuple[str, str]], framework: str | None) -> None:
    inner: Any = caller
    for name, file in modules:
        inner = code_of(name, file, "def through():\n    return inner()\n", inner=inner)["through"]
    line = code_of("__main__", "/home/me/train.py", "\n\nfound = inner()\n", inner=inner)["found"]
    assert line == ("/home/me/train.py:3", framework)


def test_a_packages_command_is_not_the_users_code() -> None:
    command = os.path.join(sysconfig.get_path("scripts"), "yolo")
    found: list[Any] = []
    file = "/x/site-packages/ultralytics/build.py"
    through = code_of("somebody.helpers", "/x/site-packages/somebody/helpers.py", CALL)["call"]
    text = "\n\ndef build():\n    found.append(call(inner))\n"
    build = code_of("ultralytics.build", file, text, call=through, inner=caller, found=found)["build"]
    start = code_of("ultralytics.cfg", "/x/site-packages/ultralytics/cfg.py", CALL)["call"]
    main = code_of("__main__", command, "def main():\n    start(build)\n", start=start, build=build)["main"]
    thread = threading.Thread(target=main)  # so that nothing of this file is beneath it
    thread.start()
    thread.join()
    assert found == [(f"{file}:4", None)]


def test_a_loader_that_the_engine_makes(stated: list[Fact]) -> None:
    from dsprof.engine.data import ShardedLoader

    DataLoader([1, 2])
    ShardedLoader([1, 2], batch_size=1)
    assert [fact["by_engine"] for fact in stated] == [False, True]


def test_a_users_callback_inside_a_framework_is_the_users(stated: list[Fact]) -> None:
    text = "def train_dataloader():\n    return DataLoader([1, 2])\n"
    mine = code_of("__main__", "/home/me/train.py", text, DataLoader=DataLoader)["train_dataloader"]
    code_of("lightning.trainer", "/x/site-packages/lightning/t.py", CALL)["call"](mine)
    assert [(fact["site"], fact["framework"]) for fact in stated] == [("/home/me/train.py:2", None)]


def test_a_loader_made_in_the_image_of_the_users_is_changed_at_the_users(stated: list[Fact]) -> None:
    text = "def prepare(loader):\n    return DataLoader(loader.dataset, num_workers=loader.num_workers)\n"
    prepare = code_of("accelerate.a", "/x/site-packages/accelerate/a.py", text, DataLoader=DataLoader)["prepare"]
    text = "loader = DataLoader([1, 2])\nprepared = prepare(loader)\n"
    made = code_of("__main__", "/home/me/train.py", text, DataLoader=DataLoader, prepare=prepare)
    assert [(fact["number"], fact["site"], fact["framework"]) for fact in stated] == [
        (1, "/home/me/train.py:1", None), (2, "/home/me/train.py:1", None),
    ]  # fmt: skip
    text = "def trainer():\n    return DataLoader([1, 2])\n"
    trainer = code_of("transformers.t", "/x/site-packages/transformers/t.py", text, DataLoader=DataLoader)["trainer"]
    code_of("__main__", "/home/me/train.py", "trainer()\n", trainer=trainer)
    assert (stated[-1]["number"], stated[-1]["site"], stated[-1]["framework"]) == (
        3, "/home/me/train.py:1", "transformers",
    )  # fmt: skip
    assert getattr(iter(made["prepared"]), LOADER) == 2


def test_the_standard_library_is_not_the_users_code() -> None:
    @contextlib.contextmanager
    def around() -> Iterator[None]:
        yield

    call = around()(caller)  # by way of contextlib's own frame
    assert code_of("__main__", "/home/me/train.py", "found = call()\n", call=call)["found"] == (
        "/home/me/train.py:1", None,
    )  # fmt: skip
