"""Trying what a run's findings advise, and whether it pays.

proposals  the changes that a run's findings offer, as knobs
files      the files of the user's that a change is made in: a diff, and the changed texts
edit_json  another value for a key of a JSON text, which otherwise stays as it is
edit_call  another value for an argument of a call in a Python text, likewise
batch_sizes  the third of a configuration's batch sizes, where two are changed or given
turns      original and changed job in turns, until the paired difference decides
decide     kept, withdrawn or undecided: the statistics
trial      one job of a comparison, from its run folder
losses     whether two jobs train alike
tune       change after change, until nothing worth it is left
journal    tune.json: what was tried, predicted and measured
corrections  what trials have shown of predictions
"""

from .decide import Decision, decide
from .edit_json import CannotEdit
from .files import Changes, changes
from .journal import Attempt, Journal, Unreadable
from .losses import LossCheck
from .proposals import Proposal, joint_proposals, proposals, slug
from .tune import Tuning
from .turns import Comparison, Run, Turns

__all__ = [
    "Attempt", "CannotEdit", "Changes", "Comparison", "Decision", "Journal", "LossCheck", "Proposal", "Run", "Tuning",
    "Turns", "Unreadable", "changes", "decide", "joint_proposals", "proposals", "slug",
]  # fmt: skip
