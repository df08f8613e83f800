"""Ranks, and what they say to each other.

mesh       who is where, and the process groups of a rank
comm       collectives over one group
lane       the thread or stream that they run on
consensus  what all ranks must agree on, and failing together
deadlock   a rank that waits for one that will not come
peers      a rank that fails by itself, and what the others learn of it
launch     joining the job's process group
"""
