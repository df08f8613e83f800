"""docs/collectors.md, made from the collectors' records: `python docs/collectors_page.py > docs/collectors.md`."""

from __future__ import annotations

from typing import Final

from dsprof.collectors.catalogue import COLLECTORS, EVERYTHING, GPU, GROUPS, NATIVE, NVML, Collector

HEAD: Final = """\
# What is recorded

A capture is what these collectors record. `dsprof doctor` says which of them work on your machine. Leave some out with
`--without`, for instance to find out which of them disturbs your job:

    dsprof run --without nvml,host-load train.py

The verdict then names what it cannot judge. This page is made from `collectors/catalogue.py`
(`python docs/collectors_page.py`); a test holds it to that table.
"""

TAIL: Final = """\
*Everything*: without it the parts of a step and the gains of all findings are not judged. *Only a proof*: the finding
may be made without it, but where it is not made, nothing is proved. A dash: a line of evidence is missing then, or the
MFU.
"""

WORDS: Final = {GPU: "a GPU", NVML: "NVIDIA's driver library (NVML)", NATIVE: "the [native helper](native-helper.md)"}


def render() -> str:
    """The page, in Markdown."""
    return "\n".join([HEAD, *map(_group, GROUPS), TAIL])


def _group(group: str) -> str:
    rows = [_row(name, one) for name, one in COLLECTORS.items() if one.group == group]
    title = group if group[:1].isupper() else group[0].upper() + group[1:]
    head = ["| collector | records | needs | cannot be judged without it |", "|---|---|---|---|"]
    return "\n".join([f"## {title}", "", *head, *rows, ""])


def _row(name: str, one: Collector) -> str:
    needs = [WORDS.get(need, f"the package `{need}`") for need in one.needs]
    if one.each_call:
        needs.append("in a job on a device the [native helper](native-helper.md)")
    judges = [_code(code) for code in one.judges] + [f"{_code(code)} (only a proof)" for code in one.proves]
    return f"| `{name}` | {one.records} | {', '.join(needs) or '-'} | {', '.join(judges) or '-'} |"


def _code(code: str) -> str:
    return "everything" if code == EVERYTHING else f"[`{code}`](findings.md#{code.replace('.', '')})"


if __name__ == "__main__":
    print(render(), end="")
