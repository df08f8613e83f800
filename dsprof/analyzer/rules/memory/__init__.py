"""Memory: memory.fragmentation, memory.oom-risk, memory.growth, memory.headroom, offload.exposed.

fragmentation        what fragmentation costs, and what held the memory when there was none left
oom_risk             a rank had no more memory, or nearly none
growth_and_headroom  memory climbs step after step, or lies idle while time is paid to save it
offload_exposed      ranks stand still for what was offloaded
offload_knobs        offloading turned off
"""
