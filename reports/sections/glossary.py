"""What the words of a report mean: those that it uses, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final, NamedTuple

from .section import Figure, Head, Said, Section

ID: Final = "glossary"
TITLE: Final = "Glossary"
LEAD: Final = "The words of this report."
PASSED_OVER: Final = ("id", "tone", "color", "ink", "swatch", "codes")
"""Fields that nobody reads, and lists of what was judged, or could not be."""


class _Term(NamedTuple):
    """used: what shows, in lower case, that a report uses it."""

    name: str
    used: str
    meaning: str


TERMS: Final = (
    _Term("activations", "activations", "tensors that forward keeps because backward needs them"),
    _Term("all-gather", "all.gathers?", "a collective after which each rank has the parts of all ranks"),
    _Term("all-reduce", "all.reduces?", "a collective after which each rank has the sum of what all ranks had"),
    _Term("bound by latency", "bound by latency",
          "messages so small that the fixed time of sending one is longer than the time that its bytes take"),
    _Term("bubble", "bubbles?", "time in which a stage of a pipeline stands still because it waits for another stage"),
    _Term("bucket", "buckets?|bucket_\\w+", "gradients or parameters that one collective carries together"),
    _Term("bus bandwidth", "bus bandwidth|busbw",
          "bytes a second that a link carries in a collective, independent of how many ranks take part (as nccl-tests "
          "tell it)"),
    _Term("collective", "collectives?", "a communication in which all ranks of a group take part"),
    _Term("confidence", "confidence", "how many of such predictions came true, of those that were tried"),
    _Term("desync", "desync", "ranks that disagree about which collective comes next, its size or its type"),
    _Term("exposed communication", "exposed comm(?:unication)?",
          "communication during which the rank computes nothing, as it needs the result to go on"),
    _Term("fragmentation", "fragmentation",
          "free memory between blocks in use, which the allocator holds and cannot use for a larger block"),
    _Term("hang", "hang", "a job that stands still because a rank never comes to a collective"),
    _Term("interval", "95 % interval",
          "the range that holds what a fix really saves in 95 of 100 such cases"),
    _Term("kernel", "kernels?", "a program that a device runs; the host launches it"),
    _Term("launch", "launch(?:es|ing)?|launch-bound", "the host's call that has a device run a kernel"),
    _Term("MFU", "mfu", "model FLOPs utilization: what the model needs of what the device can compute"),
    _Term("micro-batch", "micro-batch(?:es)?", "a part of a step's batch that runs forward and backward by itself"),
    _Term("noise", "noise", "by how much this run's mean step may differ by chance; no smaller gain is called sure"),
    _Term("optimizer states", "optimizer states", "what an optimizer keeps of each parameter, such as Adam's moments"),
    _Term("ordinary steps", "ordinary steps?",
          "steps without warm-up, evaluation, checkpoints, compilation or a stop: means and parts are of these"),
    _Term("overhead", "overhead", "how much longer a step takes because dsprof watches it"),
    _Term("own work", "own work", "the time of a step in which a rank waits for no other rank"),
    _Term("p10, p90", "p10", "a tenth of the steps takes less than p10, and a tenth takes more than p90"),
    _Term("peer wait", "peer wait|waiting for late ranks",
          "time in which a rank stands still at a collective until the last rank has come to it"),
    _Term("rank", "ranks?", "a process of the job, numbered from 0"),
    _Term("reduce-scatter", "reduce.scatters?", "a collective after which each rank has its part of the sum of all"),
    _Term("remark", "remarks?",
          "a finding whose fix is not sure to save more than the run's noise and 1 % of the step"),
    _Term("replay", "replay(?:ed|ing)?",
          "the measured steps, computed once more from what each operation took and waited for, with a change made"),
    _Term("resident memory", "resident", "the part of a process's memory that is in RAM"),
    _Term("severity", "^(?:high|medium|low)$",
          "what fixing a finding saves: high from 15 % of the step, medium from 5 %, low from 1 %"),
    _Term("shard", "shards?|sharded|fully_shard",
          "a rank's part of parameters, gradients or optimizer states that are divided over ranks"),
    _Term("stage", "stages?", "the layers that one rank of a pipeline runs (of ZeRO: how much is divided over ranks)"),
    _Term("step", "steps?", "an iteration of training, to the end of the optimizer's step"),
    _Term("straggler", "straggler", "a rank that comes late again and again, so that the others wait for it"),
    _Term("transfer", "transfers?", "the part of a collective after its last rank has come, in which bytes move"),
)  # fmt: skip


def glossary_of(head: Head, sections: Sequence[Section]) -> Section | None:
    """The words that these sections use; None where there are none."""
    said = "\n".join(_strings([head, *sections])).lower()
    lines = tuple(
        (term.name, term.meaning)
        for term in TERMS
        if re.search(rf"(?<![\w-])(?:{term.used})(?![\w-])", said, re.MULTILINE)
    )
    return Section(ID, TITLE, LEAD, (Said(lines),)) if lines else None


def _strings(value: Any) -> Iterator[str]:
    """All that is to be read in a section; of a figure, what it says it is."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Figure):
        yield value.label
    elif is_dataclass(value):
        for one in fields(value):
            if one.name not in PASSED_OVER:
                yield from _strings(getattr(value, one.name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
