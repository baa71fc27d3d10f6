"""Training: the loss, the optimizer, the training state, the training step, its loop, the log."""
