"""What scripts and libraries ask of an engine, by DeepSpeed's names: each module is a part of the class Engine."""
