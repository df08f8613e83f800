"""From a model and a configuration to an engine.

initialize   the way from one to the other
arguments    what it is given, checked and brought into one form
parallelize  leaves a rank its stages, and its shard of each layer
sync         the same model on every rank
replicas     parameters that several ranks of a replica hold
"""
