"""Linear layers in float8: what is cast, how it is scaled, where it pays.

gain          what a linear layer takes in float8, and what it takes as it is; free of torch, the analyzer asks it too
scaling       casts to float8 with a scale, and the product of what was cast
triton_casts  casts of one kernel each, on NVIDIA's devices
linear        a linear layer's three products in float8, in the place of torch's
choose        which layers take it, and their weights, gathered in float8
device        what a device does of it, and how fast

Weights, gradients and checkpoints stay in the types that they have without it: only the factors of a product are cast,
right before it (Micikevicius et al. 2022, arXiv 2209.05433).
"""
