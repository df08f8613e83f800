"""What idle time of devices that was not seen may do to a gain by replay.

Where only whole phases of a device were timed it may stand idle inside them, until its host has launched the last of a
phase. With a change that idle time may go; and where the device was late when it began a phase, as much as it was late
may turn up, once it is early. Where it is the host that a step waits for, neither makes the step another one: so the
change is replayed with phases that are as much shorter, and as much longer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..arrays import Float
from ..finding import Gain
from ..graph.chain_work import chain_work
from ..graph.replay import replay_all
from ..graph.step_graph import StepGraph
from ..study import Study, once
from ..whatif import WhatIf, apply
from ..whatif.device_work import DeviceWork
from ..whatif.work import OF_DEVICE
from ..work.device_idle import idle_of_early_devices_ms, unseen_idle_ms


def with_unseen_idle(study: Study, graph: StepGraph, before: Float, change: WhatIf, gain: Gain) -> Gain:
    """`gain` of a change, with what it would be if the idle time that was not seen went, and if as much turned up.
    before: [S] ms, the steps as they are. Raises Refused."""
    shares = _unseen_shares(study)
    if shares is None or gain.ms <= 0:
        return gain
    goes, turns_up = shares
    variants = [apply(graph, [DeviceWork(factors), change]) for factors in (1 + turns_up, 1 - goes)]
    least, most = (float((before - one.durations).mean()) for one in replay_all(variants))
    fewer = min(max(gain.ms - least, 0.0), idle_of_early_devices_ms(study))
    more = min(max(most - gain.ms, 0.0), unseen_idle_ms(study))
    return replace(gain, unseen=(fewer, more))


@once
def _unseen_shares(study: Study) -> tuple[Float, Float] | None:
    """As shares of what each rank's device computes, [R]: for how long it may have stood idle unseen, and for how much
    longer it may; None where all idle time was seen."""
    if not study.led_by_devices or unseen_idle_ms(study) <= 0:
        return None
    graph = study.need_graph()
    works = np.sum([chain_work(graph, part)[: graph.leads] for part in OF_DEVICE], axis=0).mean(axis=1)
    works = np.maximum(works, 1e-9)
    goes, turns_up = (np.minimum(ms / works, 1.0) for ms in (unseen_idle_ms(study), idle_of_early_devices_ms(study)))
    return goes, turns_up
