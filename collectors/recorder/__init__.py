"""The recorder: writes records into chunk files. In Python here; `native/` has the same in C++.

record            what a recorder is
python_recorder   the recorder in Python
chunks            the chunk files that records are written to
counters          the counters of a capture, in a mapped file
groups            process groups as the recorder in Python knows them
wait_targets      what a wait waits for
source_locations  where in the script something was called, as the id of a `file:line`
"""
