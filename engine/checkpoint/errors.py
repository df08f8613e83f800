"""The error of all that is done with checkpoints."""

from ..comm.consensus import SharedError


class CheckpointError(SharedError):
    """A checkpoint could not be saved or loaded."""
