"""The answer.

answer    what was measured and what was judged, as everything that the reports draw
headline  what holds the job back, in one sentence
"""
