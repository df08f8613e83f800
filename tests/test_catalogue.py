"""The collectors' records: each names a module that has what is promised, and findings that there are."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
from pathlib import Path

import pytest

from dsprof.collectors.catalogue import COLLECTORS, EVERYTHING, GPU, GROUPS, NATIVE, NVML

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "collectors.md"


@pytest.mark.parametrize("name", COLLECTORS)
def test_each_collector_is_installed_in_a_capture_and_gives_what_takes_it_away(name: str) -> None:
    install = importlib.import_module(f"dsprof.collectors.{COLLECTORS[name].module}").install
    signature = inspect.signature(install)
    assert [parameter.annotation for parameter in signature.parameters.values()] == ["OpenCapture"]
    assert signature.return_annotation == "list[Uninstall]"


def test_every_module_that_can_be_installed_has_a_record() -> None:
    home = ROOT / "collectors"
    found = {
        ".".join(path.relative_to(home).with_suffix("").parts)
        for path in home.rglob("*.py")
        if re.search(r"^def install\(", path.read_text(), re.MULTILINE) and path.parent.name != "overrides"
    }
    assert found == {one.module for one in COLLECTORS.values()}


def test_what_a_record_says_is_there() -> None:
    codes = {
        EVERYTHING,
        *re.findall(r"^\| \[`([a-z.-]+)`\]", (ROOT / "docs" / "findings.md").read_text(), re.MULTILINE),
    }
    assert len(codes) > 20
    for name, one in COLLECTORS.items():
        assert {*one.judges, *one.proves} <= codes, name
        assert one.group in GROUPS, name
        assert all(need in (GPU, NVML, NATIVE) or re.fullmatch("[a-z]+", need) for need in one.needs), name
        assert one.records, name


def test_the_page_is_made_from_the_records() -> None:
    render = runpy.run_path(str(ROOT / "docs" / "collectors_page.py"))["render"]
    assert PAGE.read_text(encoding="utf-8") == render(), "python docs/collectors_page.py > docs/collectors.md"
