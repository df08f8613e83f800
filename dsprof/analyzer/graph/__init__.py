"""The step graph: what every rank did in every step, as operations with costs, and edges: what waited for what.

step_graph   the graph itself: operations in arrays, and their edges
segment_work   the own work of its segments, held part by part
chains       the chains of a rank: its training thread, a device's stream, and what they give each other
find_chains  which chains a rank has
device_phases  phases that were timed on a device, and the steps of its rank
chains_of_ranks  those of all ranks, a rank at a time
gathers      parameters that a stream of its own gathers: when each could have been issued
phase_chain  that of a device whose phases were timed by events
kernel_chains  those of a device whose kernels were traced
events       what each chain's program issues and waits for, and its own work in between
tasks        collectives, messages and copies as arrays
template     the structure that equal steps share
durations    what operations took, from when they were measured to begin and end
build_graph  from tables to the graph
checked_graph  the same, and whether a replay of it is to be believed
evaluation_order   in which order operations are evaluated
longest_path       longest paths through them, for many steps and variants at once
replay       how long the steps of a graph take
critical_path   the operations that the length of a step is made of, one after the other
path_summary    the same of several steps, in few numbers
path_operations  those operations
trace_back   from an operation back to the one at whose end it began
chain_work   what each chain works in a step, and which do the same
validate     whether a replay agrees with what was measured
stalled      where threads stood still for copies of their own lanes
link         latency and bandwidth of collectives, fitted
transfers_at_once  transfers of a group that were under way at once, as one
shared_link  communications that were under way at once in one lane, whose link they shared
"""
