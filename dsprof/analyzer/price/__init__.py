"""From a what-if to a gain that can be believed.

attribution  the lost time, shared between the faults that cost it
contention   what cores that are used all the time do to predictions
calibration  how far predictions come true, as constants
"""
