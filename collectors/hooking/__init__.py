"""What hooks are made of: looking up what is hooked, wrapping it, taking the wrapper away, and failing without harm.

hook_parts     installs the hooks of a collector one by one: one that fails costs what it alone records
timed          the wrapper around what is timed: something begins before a call, and ends after it
constructors   looking on as objects of a class are made
wrap           wrappers that stand for the function they wrap
uninstall      what a hook gives back: the function that takes it away again
late_imports   hooks in modules that the job imports later, or never
private        looks up private names of torch and of frameworks, and says what is lost where one is gone
private_names  the table of these names
caller         which line of the user's code called, by way of which framework
dynamo         keeps torch.compile away from hooks
forks          locks that a forked child finds free
signals        exceptions that a signal's handler of the job raised inside a hook: they are the job's
errors         errors inside the profiler, which the job must not see
statements     facts on their way into the capture, kept until one opens
"""
