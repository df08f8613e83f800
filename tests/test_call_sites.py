"""Lines that issue collectives, as they are stated at level full."""

from __future__ import annotations

from typing import Any

import torch

from dsprof.collectors import call_sites, facts
from dsprof.collectors.call_sites import CallSites
from dsprof.schema import CALL_SITE


def test_each_line_is_stated_that_issues_the_same() -> None:
    stated: list[dict[str, Any]] = []
    issue = CallSites(stated.append).watch("all_reduce")(lambda group, tensors: None)
    for _ in range(3):
        issue(None, [torch.ones(10)])
        issue(None, [torch.ones(10)])
    first, second = stated
    assert {key: first[key] for key in ("fact", "name", "bytes", "dtype")} == {
        "fact": CALL_SITE, "name": "all_reduce", "bytes": 40, "dtype": "float32"
    }  # fmt: skip
    (file, line), (other_file, other) = (one["site"].rsplit(":", 1) for one in stated)
    assert file == other_file == __file__
    assert int(other) == int(line) + 1
    assert {**second, "site": first["site"]} == first


def test_that_there_are_more_is_stated(monkeypatch: Any) -> None:
    monkeypatch.setattr(call_sites, "MOST", 2)
    lines = iter("abcd")
    monkeypatch.setattr(facts, "caller_site", lambda: f"train.py:{next(lines)}")
    stated: list[dict[str, Any]] = []
    issue = CallSites(stated.append).watch("all_reduce")(lambda group, tensors: None)
    for _ in range(4):
        issue(None, [torch.ones(10)])
    assert [one.get("site") for one in stated] == ["train.py:a", "train.py:b", None]
    assert stated[2] == {"fact": CALL_SITE, "more": True}
