"""The configuration: DeepSpeed's JSON as typed models, with what it says checked before anything runs.

    from dsprof.engine.config import Config, ConfigError, load

    config = load("ds.json", world_size=8)      # or a dict; raises ConfigError, which lists every problem
    config.zero_optimization.stage, config.train_batch_size, config.warnings

A section is a file, a key a field with its documentation under it (docs/engine-config.md is made from these):

    config          the top-level keys; precision, checkpoints
    model           what sections and values are made of
    zero  optimizer  scheduler  debugging  parallel (and heterogeneous ranks)

and what is done to a configuration, in this order, by `loading`, which also says what one key does and takes:

    keys            unknown, renamed and foreign ones; the nearest of these; deepspeed_keys lists the last; pydantic's
                    errors about values in our words
    cases  rules    contradictions, and what has no effect: in a sentence, or found by a function
    batch           train_batch_size = micro-batch x accumulation x ranks

`held` says what a rank holds in memory. docs/engine_config.py makes a page of all. Free of torch and of the rest of
the engine: the analyzer and `dsprof doctor` use it too.
"""

from .batch import ACCUMULATION, MICRO, TRAIN, Batch, BatchError, remedies
from .config import Config, data_parallel_ranks, replicas_of
from .held import ELEMENT_BYTES, Held, held
from .keys import known_paths
from .loading import ConfigError, as_far_as_known, key_can_be, key_says, key_takes, load
from .parallel import replica_memory
from .zero import ZeroConfig

__all__ = [
    "ACCUMULATION", "ELEMENT_BYTES", "MICRO", "TRAIN", "Batch", "BatchError", "Config", "ConfigError", "Held",
    "ZeroConfig", "as_far_as_known", "data_parallel_ranks", "held", "key_can_be", "key_says", "key_takes",
    "known_paths", "load", "remedies", "replica_memory", "replicas_of",
]  # fmt: skip
