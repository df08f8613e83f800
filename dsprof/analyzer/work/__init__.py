"""What training computes, and how well.

mfu           floating-point operations, MFU, samples and tokens a second
peaks         what devices can compute at most
module_times  what each module takes
passes        each forward and backward of a micro-batch on a rank
micro_batches whether micro-batches are of unequal length, by what they take
stream_phases what devices took for each phase that their hosts launched
core_wait     how long training threads wait for a core, and what has it (taken_cores)
recomputed    what backward computes again of forward
stacks        in which lines training threads were: where ranks differ, and what lies between phases
stack_difference  the samples of some ranks beside those of their peers, as a tree
pipeline_step one step of a pipeline, measured and ideal
layer_costs   what each layer of the engine's pipelines takes
fixed_part    what of a forward or backward does not depend on the size of its micro-batch
stage_layers  the layers of any pipeline's stages, at which they can be divided
"""
