"""What a checkpoint holds besides its tensors: numbers, texts and collections of them, and random number generators.

They are written with `torch.save` and read with `weights_only`, which runs nothing. What could not be read so is
refused when it is to be written.
"""

from __future__ import annotations

import io
import pickle
import random
import sys
from collections import Counter, OrderedDict
from typing import Any, Final

import torch
from torch import Tensor, nn

from .folder import CheckpointError

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype)
_MAPPINGS: Final = (dict, OrderedDict, Counter)
_COLLECTIONS: Final = (list, tuple, set)


def pack(value: Any, name: str) -> bytes:
    """`value` as bytes that `unpack` takes. Raises CheckpointError for a kind of value that would need code to load.

    `name` is what the value is called in that error. Tensors are copied to the CPU.
    """
    buffer = io.BytesIO()
    torch.save(plain(value, name), buffer)
    return buffer.getvalue()


def unpack(data: bytes, name: str) -> Any:
    """The value that was packed. Raises CheckpointError if it holds anything else than `pack` writes."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{name} holds objects that a checkpoint cannot have: the file is damaged, or was made to run code. "
            "Nothing of it was run"
        ) from error
    except Exception as error:
        raise CheckpointError(f"{name} cannot be read, so the file is damaged ({type(error).__name__})") from error


def plain(value: Any, name: str) -> Any:
    """A copy of `value`, with tensors on the CPU, if `pack` takes it; else it raises what that does."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (Tensor, nn.Parameter):
        return value.detach().cpu().clone()  # a view would take along all it is a view of
    if kind in _MAPPINGS:
        items = ((plain(key, f"a key of {name}"), plain(item, f"{name}[{key!r}]")) for key, item in value.items())
        return kind(dict(items)) if kind is not dict else dict(items)
    if kind in _COLLECTIONS:
        return kind(plain(item, f"{name}[{at}]") for at, item in enumerate(value))
    number = _number(value)
    if number is not None:
        return number
    raise CheckpointError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, and loading one would have to run code. Write it as None, "
        "numbers, texts, tensors, or dicts, lists, tuples and sets of these: x.tolist() for an array of NumPy's, "
        "vars(x) for a namespace, str(x) for a path, x.state_dict() for an object that has one"
    )


def _number(value: Any) -> Any:
    """A number of NumPy's as one of Python's, None if it is no such: they look alike when printed."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic):
        return None
    plain_one = value.item()
    return plain_one if type(plain_one) in _PLAIN else None


# --- random number generators


def random_states(device: torch.device) -> dict[str, Any]:
    """Where this process's generators stand: torch's on the CPU and on `device`, Python's, and NumPy's if it is
    loaded.
    """
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        if isinstance(state, tuple):  # not that of a generator the program has put in its place
            algorithm, keys, *rest = state
            states["numpy"] = (algorithm, keys.tolist(), *rest)
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Go on from where `random_states` found the generators."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    numpy = sys.modules.get("numpy")
    if "numpy" in states and numpy is not None:
        numpy.random.set_state(states["numpy"])
