"""The analyzer: a trace in, findings out. Pure: no printing, no torch; and no files but those that the trace reads.

    analyze      the way from a trace to a verdict: study, judge, answer
    study        everything measured, and nothing judged
    rank_summary a rank by itself: all that is kept of its rows
    signals      what a capture tells, or why it does not
    judge        ask every rule, price what they find, and rank it
    candidate    what a rule finds before it is priced
    effect       what a change that a user or a rule asks about does to the steps
    structure    another structure of a pipeline, as a user asks for it
    stage_costs  what the stages of another plan take, and the best boundaries between them
    ask          what changes save that a user asks about, alone and together
    finding      findings, their evidence, gains and fixes
    analysis     what comes out: everything the reports draw
    text         how numbers and names are said
    arrays       the three types of arrays
    columns      columns of tables as arrays
    freed_memory what the C library keeps of memory that was freed

The rooms; the docstring of each is its table of contents:

    align/       the ranks beside each other: one clock, one numbering, one name for each communication
    budget/      where the time went
    graph/       the step graph, its replay, and whether to believe it
    whatif/      what-ifs, which compose
    layout/      another layout of a measured job, lowered to a graph: what a step takes, what ranks hold
    price/       from a what-if to a gain with an interval
    rules/       what is known of each finding: one record a code
    device/      what devices' streams did, where their kernels were traced; NVML
    memory/      what is known of memory; allocator/: a simulator of torch's caching allocator
    work/        what training computes: modules, layers, MFU
    hang/        ranks that wait for one another
    verdict/     the answer
"""

from __future__ import annotations

from .analyze import analyze

__all__ = ["analyze"]
