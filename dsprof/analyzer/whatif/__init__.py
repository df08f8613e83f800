"""What-ifs: changes to the steps that were measured. They compose, in whatever order they are given.

    faster = apply(graph, [ScaleLink(bandwidth=10.0), ScaleWork({"compute": 0.5})])
    replay(faster).durations  # [S] ms of the judged steps

apply           `apply`, and what every what-if is: `WhatIf`; `Refused`: two that do not go together
select          which operations a what-if is about: by purpose, process group, rank
work            own work taken away, scaled, or made equal on ranks that do the same
uncaptured      what ranks wait for those that were not captured
even_segments   as much work between the same events on all ranks of a team
faster_hosts    what hosts compute to launch takes less
device_work     what devices compute takes longer, or less
without_flows   no chain waits for another of its rank; or only for those
communications  collectives and messages removed, added, or moved over another link
needless        reductions and broadcasts that a step can do without
prefetched      gathers issued earlier
fetching        parameters of ZeRO's stage 3 gathered by the policy of an engine, with other limits
waited_for      communications waited for at another place: at once, or while others are under way
overlapped_messages  what a pipeline's stages send each other goes beside their computation
issue_order     in which order a lane takes tasks that are issued elsewhere
last_end        communications that come to one rank later than to another
rebucket        gradients in other buckets
merge           neighbouring collectives in one
typical         nothing slower than is typical of its kind
schedule        the graph of a pipeline's schedule, and another schedule of the same actions
lowering        a pipeline's plan, with what its actions were measured to take -> the graph of all ranks
edit            the structure of equal steps edited: edges, tasks and segments that come and go
"""

from __future__ import annotations

from .apply import Refused, Turn, WhatIf, apply, clash

__all__ = ["Refused", "Turn", "WhatIf", "apply", "clash"]
