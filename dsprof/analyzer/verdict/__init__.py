"""The answer.

answer          what was measured and what was judged, as everything that the reports draw
overrides       what became of the knobs that `dsprof run --set` turned, and of fixes that were tried
headline        what holds the job back, in one sentence
next_step       what to type next where that is not known
useful_by_name  what counts as computing or as the optimizer, and may be lost all the same
"""
