"""Put the ranks of a run beside each other: one clock, one numbering of steps, one name for each communication.

aligned      the first pass: all ranks beside each other
communicated what is kept of what they communicated, beside the matches
progress     how far each rank was at the end; collectives that ranks disagree about
clock        every rank on one clock
steps        steps under numbers that mean the same on all ranks
groups       process groups by their ranks, and the dimensions of the mesh that like ones form
topology     which ranks are stages of a pipeline
match        the same collective or message on all ranks
broadcast_tree  who waits for whom where a broadcast is handed on along a tree
link_shares  which share of a link each of the transfers has that are under way at once
participants who takes part in each, in order of arrival
senders      which senders go on before what they sent is there
numbering    communications that came without a number
backends     what a communication backend does
"""
