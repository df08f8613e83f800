"""The step graph: what every rank did in every step, as operations with costs, and edges: what waited for what.

step_graph   the graph itself: operations in arrays, and their edges
events       what each rank's program issues and waits for, and its own work in between
tasks        collectives, messages and copies as arrays
template     the structure that equal steps share
durations    what operations took, from when they were measured to begin and end
build_graph  from tables to the graph
evaluation_order   in which order operations are evaluated
longest_path       longest paths through them, for many steps and variants at once
replay       how long the steps of a graph take
validate     whether a replay agrees with what was measured
stalled      where threads stood still for copies of their own lanes
link         latency and bandwidth of collectives, fitted
"""
