"""The dsprof tab of TensorBoard: the report of every run below the log folder.

loader         the entry point: light, and never the end of a TensorBoard
plugin         the routes
run_listing    which runs there are, under which ids
run_views      what is shown of a run, as JSON
cannot_answer  why a request has no answer
"""
