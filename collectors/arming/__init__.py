"""Arms a process: what happens between `import torch` and the opening of the capture.

process         patches a few things and waits until the process shows itself to be a rank
free_threaded   declines where Python has no global interpreter lock, and says so
in_process      captures a part of a program that runs already
launch_hints    tells the launcher that the script wants to be started in another way
"""
