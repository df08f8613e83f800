"""The analyzer: a trace in, findings out. Pure: no printing, no torch; and no files but those that the trace reads.

    analyze      the way from a trace to a verdict
    analysis     what comes out: everything the reports draw
    finding      findings, their evidence, gains and fixes

From rows to time:
    aligned      all ranks beside each other; what of them is held at once
    clock        every rank on one clock
    steps        steps under numbers that mean the same on all ranks
    topology     which ranks are stages of a pipeline
    match        the same collective or message on all ranks; `numbering` of those that came without a number
    summary      a rank by itself: all that is kept of its rows
    kinds        what the run's wall time went into
    lanes        what each lane of a rank did, and what its waits were for; `lane_tasks`: what was issued to it
    budget       where each rank's step went; `intervals` is its arithmetic
    parts        what the parts of a budget are: own work, waiting
    irregular    ordinary steps, and those that are not
    load         how busy the cores are
    device/      what devices' streams did, where their kernels were traced: HTA's numbers, lateness, bandwidths; NVML
    waits, overhead, layers, modules   what reports and fixes want to know besides

From time to gains:
    points       what each rank issues and waits for, and its own work in between
    tasks        collectives, messages and copies as arrays
    build        from points and tasks to the step graph; `shape`: one step of it, `durations`: arithmetic
    graph        the step graph: operations in arrays, edges that say what waited for what
    backends     what a communication backend does
    order        in which order operations are evaluated
    levels       longest paths, for many steps and variants at once
    replay       how long the steps of a graph take
    trust        whether a replay agrees with what was measured
    whatif/      functions from graph to graph
    link         latency and bandwidth, fitted
    attribution  the lost time, shared between the faults that cost it
    contention   what cores that are used all the time do to predictions
    calibration  how far predictions come true, as constants

From gains to an answer:
    context      what rules work with
    rules/       one file a family of findings
    judge        ask every rule, and rank what they say
    verdict      the answer in one sentence; `text` is how numbers are said
"""

from __future__ import annotations

from .analyze import analyze

__all__ = ["analyze"]
