"""Trying what a run's findings advise, and whether it pays.

proposals  the changes that a run's findings offer, as knobs
turns      original and changed job in turns, until the paired difference decides
decide     kept, withdrawn or undecided: the statistics
trial      one job of a comparison, from its run folder
"""

from .decide import Decision, decide
from .proposals import Proposal, proposals
from .turns import Comparison, TrialFailed, Turns

__all__ = ["Comparison", "Decision", "Proposal", "TrialFailed", "Turns", "decide", "proposals"]
