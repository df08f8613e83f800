"""Launching: `dsprof run`.

job        what is to be started: a script, ranks under torchrun, any command
launch     the whole of it: makes the run folder, starts the job armed, ends with a verdict
claim      making the run folder, and making room for it
hosts      one run of several hosts: joining it, agreeing on it, waiting for the others' ends
supervise  one child process: its signals, its status
torchrun   torchrun in a process of ours, which tells how each rank ended
gather     captures that were written to a local disk first
left_behind  captures in memory or on a local disk whose processes were killed
again      the job of a run, run again
outputs    what files a job wrote
conclude   after the job: how it ended, the analysis, the verdict
hints      what to type instead, where a job died of how it was started
talk       lines on stderr
devices    how many GPUs a rank would see
"""

from __future__ import annotations

from .job import Job, LaunchError
from .launch import Launch

__all__ = ["Job", "Launch", "LaunchError"]
