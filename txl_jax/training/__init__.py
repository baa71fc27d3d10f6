"""Training: loss, optimizer, state, the pure step, the trainer that calls it, and its log."""
