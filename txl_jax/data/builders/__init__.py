"""One TFDS builder per corpus; importing one imports TFDS (never TensorFlow)."""
