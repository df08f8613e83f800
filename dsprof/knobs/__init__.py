"""What a user can turn: a record for each knob, a file for each framework.

knob         the record, what values a knob takes, and what a run states of it
registry     all of them, and how `KEY=VALUE` is read and written
ddp fsdp2 loader pipelining optimizer compilation host trainers
             the knobs of a framework
predicted    those whose effect on a run's steps is predicted
loader_whatifs
             of those the DataLoader's, beside one another
memory       what values hold of each rank's memory
unit_memory  the most that FSDP2's units hold in a step
structures   those that change the plan of a pipeline
layouts      another layout of a job, and what ranks would hold in another structure
questions    how `dsprof whatif`'s words are read
json_config  any key of a JSON configuration of DeepSpeed or of dsprof's engine

`dsprof.collectors.overrides` is the other half: how a rank applies them without an edit.
"""

from .knob import Knob, KnobError, Stated
from .registry import FACT_OF, KNOBS, find, flags, parse_settings, typed

__all__ = ["FACT_OF", "KNOBS", "Knob", "KnobError", "Stated", "find", "flags", "parse_settings", "typed"]
