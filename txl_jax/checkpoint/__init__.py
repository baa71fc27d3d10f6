"""Stores models in checkpoints, workdirs and exported folders, and on the Hugging Face Hub."""
