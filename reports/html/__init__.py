"""The bottleneck report: one HTML file that needs no network and sends nothing.

The run's own strings (command, names, paths) are untrusted: the template escapes them, figures travel as JSON
that is never executed, and the Content-Security-Policy names the two scripts by their hashes, so that no other
script can run and nothing can be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import jinja2
from markupsafe import Markup, escape

from dsprof.analyzer.analysis import Analysis

from .. import wording
from ..sections import report_of
from ..sections.section import kind, without_figures

HERE: Final = Path(__file__).parent

_IN_SCRIPT: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render(analysis: Analysis, *, step: int | None = None, ranks: tuple[int, ...] = ()) -> str:
    """The whole report as one HTML document. step, ranks: of its timeline, in the place of those worth a look."""
    plotly_js, page_js = asset("plotly-cartesian.min.js"), asset("figures.js") + asset("page.js")
    report = report_of(analysis, step=step, ranks=ranks)
    figures = {name: figure.plain() for name, figure in report.figures.items()}
    return template("page.html.j2").render(
        report=report,
        figures=Markup(_script_json(figures)),
        style=Markup(asset("theme.css") + asset("blocks.css") + asset("page.css")),
        plotly_js=Markup(plotly_js),
        page_js=Markup(page_js),
        policy=_policy(plotly_js, page_js),
    )


def as_fragment(analysis: Analysis, sections: Collection[str], note: str = "") -> str:
    """The verdict and some sections, by their ids, to stand in a page of somebody else's, such as a notebook's cell.
    Without scripts, so without figures. note: what else is to be said."""
    report = report_of(analysis, sections)
    shown = [replace(section, blocks=without_figures(section.blocks)) for section in report.sections]
    theme = asset("theme.css").replace(":root, .dsprof", ".dsprof")
    inside = f".dsprof {{ {asset('blocks.css')} }}"  # of what is in it, and of nothing around it
    return template("fragment.html.j2").render(
        head=report.head, sections=shown, note=note, style=Markup(theme + asset("fragment.css") + inside)
    )


def prose(words: str) -> Markup:
    """Words as HTML: numbers kept with their units, and what stands between backticks as code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(wording.unbroken(words)))))


_CODE: Final = re.compile(r"`([^`\n]+)`")


@cache
def template(name: str) -> jinja2.Template:
    """A template of this folder, which escapes all that it is given."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters["kind"] = kind
    environment.filters["prose"] = prose
    return environment.get_template(name)


@cache
def asset(name: str) -> str:
    """A file of this folder."""
    return (HERE / name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    """Nothing but these two scripts, our styles, and the pictures that plotly draws itself."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )


def _script_json(value: Any) -> str:
    """JSON that is safe inside a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return "".join(_IN_SCRIPT.get(char, char) for char in text)
