"""What a recipe needs of a machine that is not at hand: memory, FLOPs, collectives, time."""
