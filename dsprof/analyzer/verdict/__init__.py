"""The answer.

headline      what holds the job back, in one sentence
"""
