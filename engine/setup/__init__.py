"""From a model and a configuration to an engine.

initialize   the way from one to the other
arguments    what it is given, refused before anything is opened
measure_speed  how fast each rank is, where the configuration asks for that
measure_memory  how much memory each rank has, likewise
parallelize  leaves a rank its stages, and its shard of each layer; what ranks of a replica share; the same
             configuration and model on every rank
"""
