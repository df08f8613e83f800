"""A device that is not the CPU, on any machine: torch's PrivateUse1 key with kernels in Python, its values kept on the
host. It stands where CUDA's kernels stand, behind the dispatcher, so that what is in front of these is in front of it.
"""

from __future__ import annotations

from typing import Any

import torch

KERNELS = """
values = {}

def made(like):
    tensor = torch._C._acc.create_empty_tensor(like.shape, like.dtype)
    values[id(tensor)] = tensor, like.clone()
    return tensor

def copy_(self, source, non_blocking=False):
    slow()
    if self.device.type == "cpu":
        self.copy_(values[id(source)][1])
    else:
        values[id(self)] = self, (values[id(source)][1] if source.device.type == "npy" else source).clone()
    return self

def to_copy(self, *, device=None, non_blocking=False, **options):
    host = values[id(self)][1] if self.device.type == "npy" else self
    on_device = device is not None and torch.device(device).type == "npy"
    return (made(host) if on_device else torch.empty_like(host)).copy_(self, non_blocking)

def item(self):
    return values[id(self)][1].item()

def nonzero(self):
    return made(values[id(self)][1].nonzero())
"""
"""Compiled under a name that is no file's, as kernels in C++ have no frames."""


def start(slow: Any = lambda: None) -> Any:
    """Have torch know the device `npy`; what makes a tensor of it. `slow` is called in each of its copies."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("npy")
    kernels: dict[str, Any] = {"torch": torch, "slow": slow}
    exec(compile(KERNELS, "<npy>", "exec"), kernels)
    kernels["library"] = library = torch.library.Library("aten", "IMPL")
    names = {"copy_": "copy_", "_to_copy": "to_copy", "_local_scalar_dense": "item", "nonzero": "nonzero"}
    for operator, kernel in names.items():
        library.impl(operator, kernels[kernel], "PrivateUse1")
    start.kernels = kernels  # type: ignore[attr-defined]  # kept alive
    return kernels["made"]
