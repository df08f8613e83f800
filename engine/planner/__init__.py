"""How the layers of a model that nobody annotated are sharded over tensor-parallel ranks.

derive            from a model to a plan
example_inputs    made-up inputs for a forward
tracer            one forward of the whole model
dependence        what depends on what in it
solve             the cheapest styles of layers that fit
adapt             modules that read their own shapes
verify            the sharded forward held against the whole one
blocks            where activations are sharded along the sequence
sequence_pipeline, stage_tracer, tied_vocab    the same in pipelines
plan, styles      what a plan is
apply             a plan carried out
"""
