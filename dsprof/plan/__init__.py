"""What a job would do on other ranks: how long a step takes, how much memory a rank needs, and which layout is best.

steps      shapes of training steps, a column each
cost       the model: the time of a step from its shape and thirteen figures of the hardware
fit        these figures, learnt from measured steps
calibrate  predictions with intervals that held on steps left out of the fit
hardware   devices' memory and links, and what to expect of a machine that nothing was measured on
memory     how much memory a rank needs
layouts    the layouts of a model on N ranks that fit, and how fast each is
formulas   a plan without a run
from_run   a plan from a measured run: more replicas of what it does
ranked     the layouts of a measured run on N ranks, the fastest first, by lowering and replay
run_answer what `dsprof plan RUN` answers: both
network    the network between nodes, as a user tells of it
changes    what else changes then: the device, the batch of a rank
spending   what a training costs
table      a table of measured steps, read
choice     how well steps that were kept from it are predicted
told       what `dsprof plan --calibrate` answers
"""
