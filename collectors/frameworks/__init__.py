"""What one framework needs beyond the hooks in torch itself.

deepspeed        steps, backwards and pipelines of DeepSpeed's engine
tensor_parallel  which process groups torch's tensor parallelism communicates in
"""
