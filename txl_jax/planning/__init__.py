"""The memory, FLOPs and collectives that an experiment needs on a machine not at hand."""
