"""The catalogue in docs/findings.md, of the rules' records: `python docs/findings_catalogue.py` writes it there."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dsprof.analyzer.rules.registry import all_rules

PAGE: Final = Path(__file__).with_name("findings.md")
HEAD: Final = "| code | says |\n|---|---|\n"


def catalogue() -> str:
    """The table of codes, in Markdown."""
    lines = [f"| [`{rule.code}`](#{rule.code.replace('.', '')}) | {rule.says} |\n" for rule in all_rules()]
    return HEAD + "".join(lines)


def with_catalogue(page: str) -> str:
    """The page with its table of codes made anew. Raises ValueError where it has none."""
    begin = page.index(HEAD)
    end = page.index("\n\n", begin) + 1
    return page[:begin] + catalogue() + page[end:]


if __name__ == "__main__":
    PAGE.write_text(with_catalogue(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
