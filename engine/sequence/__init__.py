"""Sequences divided over ranks (context parallelism), each of which has some positions of every sequence.

layout    which positions
ulysses   the attention: all-to-alls between positions and heads
ring      the other: keys and values that go round, and the attention of one block of them
parallel  divides batches, counts losses, and puts that attention in the place of torch's
trial     holds a model that is divided so against the whole one

    batch = engine.shard_sequence(batch)      # of all ranks that share sequences the same
    loss = engine(**batch).loss
    engine.backward(loss)

In a model, `positions(length, device)` stands in the place of `torch.arange(length)`.
"""

from .parallel import SequenceParallel, positions

__all__ = ["SequenceParallel", "positions"]
