"""The glossary explains the words that a report uses, and no others, alike in every output."""

from __future__ import annotations

import re

import factories
import pytest
from test_same_numbers import shown

from dsprof.reports.sections import glossary, report_of
from dsprof.reports.sections.section import Codes, Said, Section, Words


def words(text: str) -> list[str]:
    """The terms of which a section with this text makes a glossary."""
    head = report_of(factories.empty(), ["none"]).head
    found = glossary.glossary_of(head, [Section("a", "", "", (Words(text),))])
    if found is None:
        return []
    (said,) = found.blocks
    assert isinstance(said, Said)
    return [name for name, _ in said.lines]


def test_only_words_that_are_used() -> None:
    always = words("")
    assert set(always) <= {"step", "rank"}, "the head's own"
    told = words("the bubble of stages; an all_reduce of a bucket; fully_shard; backstage; bucketing; noise 3 ms")
    assert [name for name in told if name not in always] == [
        "all-reduce",
        "bubble",
        "bucket",
        "noise",
        "shard",
        "stage",
    ]


def test_what_was_only_judged_needs_no_words() -> None:
    section = Section("a", "", "", (Codes("Passed", ("pipeline.bubble", "rank.straggler"), good=True),))
    head = report_of(factories.empty(), ["none"]).head
    assert glossary.glossary_of(head, [section]) == glossary.glossary_of(head, [])


def test_each_word_is_explained_once_in_order_of_the_alphabet() -> None:
    names = [term.name for term in glossary.TERMS]
    assert names == sorted(set(names), key=str.lower)
    assert all(re.compile(term.used) and not term.meaning.endswith(".") for term in glossary.TERMS)


def test_it_stands_last_and_reads_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    analysis = factories.straggler()
    last = report_of(analysis).sections[-1]
    assert last.id == "glossary"
    (said,) = last.blocks
    assert isinstance(said, Said)
    terms = dict(said.lines)
    assert {"peer wait", "straggler", "ordinary steps", "replay"} <= set(terms)
    assert not {"bubble", "kernel", "stage", "MFU", "micro-batch"} & set(terms)
    places = shown(analysis, monkeypatch)
    for where in ("html", "tab", "markdown"):
        for name, meaning in terms.items():
            assert re.search(rf"{re.escape(name)}\W+{re.escape(meaning)}", places[where]), (where, name)


def test_who_asks_for_some_sections_gets_the_glossary_of_these() -> None:
    report = report_of(factories.straggler(), ["step", "glossary"])
    assert [section.id for section in report.sections] == ["step", "glossary"]
    assert [section.id for section in report_of(factories.straggler(), ["step"]).sections] == ["step"]
