"""docs/engine-config.md says what the models say: every key, its default, what it does."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from dsprof.engine.config import Config
from dsprof.engine.config.model import Section, TorchParams, sections
from dsprof.words import joined

DOCS = Path(__file__).parents[2] / "docs" / "engine-config.md"
render = runpy.run_path(str(DOCS.with_name("engine_config.py")))["render"]
SECTIONS = [(where, section) for where, section in sections(Config) if not issubclass(section, TorchParams)]


def test_the_page_is_what_the_models_say() -> None:
    assert DOCS.read_text(encoding="utf-8") == render(), "python docs/engine_config.py > docs/engine-config.md"


@pytest.mark.parametrize(("where", "section"), SECTIONS, ids=[section.__name__ for _, section in SECTIONS])
def test_every_key_is_documented_where_it_is_defined(where: str, section: type[Section]) -> None:
    page = DOCS.read_text(encoding="utf-8")
    assert section.__doc__
    assert section.model_fields
    for key, field in section.model_fields.items():
        assert field.description, joined(where, key)
        assert field.description.rstrip().endswith("."), joined(where, key)
        assert f"| `{key}` |" in page, joined(where, key)


def test_the_sections_are_all_there() -> None:
    assert len({where for where, _ in SECTIONS}) == 23
    assert sum(len(section.model_fields) for _, section in SECTIONS) > 150


def test_what_the_page_looks_like() -> None:
    page = render()
    assert (
        "| `reduce_bucket_size` | a whole number above 0 | `5e8` | Elements of gradient reduced in one communication. "
        "Smaller buckets start earlier, larger ones cost less each. |\n"
    ) in page
    assert "## `optimizer.params` of OneBitAdam\n" in page
    assert '| `amp` | error | write "bf16": {"enabled": true}, or "fp16"; DeepSpeed has removed it too |\n' in page
    assert "| `bfloat16` | `bf16` |\n" in page
