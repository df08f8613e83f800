"""MFU, tokens a second and the table of modules, as text and as a page."""

from __future__ import annotations

import io
import math
import textwrap
from dataclasses import replace

import factories
import pandas as pd
from test_report_html import text_of

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.work.mfu import Efficiency, Throughput
from dsprof.analyzer.work.module_times import COLUMNS
from dsprof.reports import efficiency, html, terminal

FOUND = Efficiency(
    flops={"forward": 30e12, "backward": 60e12, "recompute": 10e12, "other": 0.0},
    counted=(0, 1),
    flops_a_second=900e12,
    mfu=0.4548,
    hfu=0.5053,
    peak="H100 SXM in bfloat16, 989.5 TFLOP/s (https://example.com)",
    why_no_mfu="",
    throughput=(
        Throughput("samples", 80.0, 40.0, (0, 1), "the first dimension of input_ids of GPT"),
        Throughput("tokens", None, 640.0, (), "the size of input_ids of GPT; it is not known"),
    ),
    notes=("what flash_attn::forward (12 calls) computes is not known",),
)
MODULES = pd.DataFrame(
    [
        ("blocks.0", 2.0, 7.5, 3.25, 11.0, 7.0, 0.0, 0.25, 1, 10.5),
        ("<b>head</b>", 1.5, 1.0, 1.0, math.nan, math.nan, 0.5, 0.0, 0, 1.0),
    ],
    columns=list(COLUMNS),
)


def full() -> Analysis:
    return replace(factories.healthy(), efficiency=FOUND, modules=MODULES)


def test_the_verdict_has_a_line_for_each() -> None:
    file = io.StringIO()
    terminal.render(full(), file, color=False, width=100)
    expected = textwrap.dedent("""
        operations   90.0 TFLOP a step on each rank, mean: forward 30.0 TFLOP, backward 60.0 TFLOP; beside
                     it 10.0 TFLOP computed again
        MFU          45 %, 51 % with what is computed again (HFU), of H100 SXM in bfloat16, 989.5 TFLOP/s
                     (https://example.com)
        samples/s    80.0; the first dimension of input_ids of GPT
        tokens/s     640 each rank; the size of input_ids of GPT; it is not known
        not counted  what flash_attn::forward (12 calls) computes is not known
        """)
    assert expected in file.getvalue()


def test_the_reason_stands_where_there_is_no_mfu() -> None:
    unknown = replace(FOUND, mfu=None, hfu=None, why_no_mfu="no data sheet is known of X")
    assert dict(efficiency.lines(replace(full(), efficiency=unknown)))["MFU"] == "none: no data sheet is known of X"


def test_the_page_has_numbers_and_the_table() -> None:
    words = text_of(html.render(full()))
    assert "MFU 45 % HFU 51 % model operations 900 TFLOP/s samples a second 80.0 tokens a second and rank 640" in words
    assert "blocks.0 2 7.50 3.25 11.0 7.00 0 0.25 10.5 on 1" in words
    assert "<b>head</b> 1.50 1.00 1.00 – – 0.50 0 1.00 on 0" in words
    assert "Not timed in backward: <b>head</b>." in words


def test_below_level_full_there_is_nothing_of_it() -> None:
    words = text_of(html.render(factories.healthy()))
    assert "How well the devices are used" not in words
    assert "Modules" not in words


def test_without_the_helper_no_module_is_timed_in_backward() -> None:
    analysis = replace(full(), modules=MODULES.assign(backward_ms=math.nan))
    for info in analysis.run.ranks:
        info.native = False
    assert efficiency.unseen(analysis) == (
        "No module was timed in backward: that needs the native helper, which was not there."
    )


def test_json_has_both() -> None:
    found = full().to_dict()
    assert found["efficiency"]["mfu"] == 0.4548
    assert found["modules"][0]["backward_own_ms"] == 7.0
