"""Training: loss, optimizer, state, sharding, one pure step, the loop, checkpoints, the log."""
