"""What is known of memory.

allocator_state      what the allocators of the devices held in the end
allocated_over_time  what was in use over the history of an allocator, and what the peak was made of
rank_memory          what a rank takes, and would take with a change
use_by_step          memory over the steps of a live run
free                 what a rank surely has left at its peak
slope                whether a series climbs, and how fast
"""
