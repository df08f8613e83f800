"""What training computes, and how well.

mfu           floating-point operations, MFU, samples and tokens a second
peaks         what devices can compute at most
module_times  what each module takes
layer_costs   what each layer of the engine's pipelines takes
"""
