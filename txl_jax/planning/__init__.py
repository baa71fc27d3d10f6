"""The memory, FLOPs and collectives that an experiment needs on an absent machine."""
