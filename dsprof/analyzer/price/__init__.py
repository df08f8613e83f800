"""From a what-if to a gain that can be believed.

pricing              what candidates gain: each alone, and its share of what all of them gain
excess               the gain of costs that were measured by themselves
device               what is gained on devices whose kernels were traced
unseen_idle          what idle time of devices that was not seen may do to a gain
effects              what settings gain that rules try against each other
joint                what several settings, or changes that a user asks about, gain together
together             the same with what predictions of their kinds are missed by
bubble_shares        why stages of a pipeline wait, in parts that sum to it
gains                the ms that a step gets shorter by, each with its interval; the run's noise floor
confidence_interval  intervals of the mean of a series of steps
attribution          the lost time, shared between the faults that cost it
certainty            the interval of a gain with all that makes predictions miss
contention           what cores that are used all the time do to predictions
calibration          how far predictions come true, as constants
"""
