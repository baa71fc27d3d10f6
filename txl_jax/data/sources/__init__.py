"""Finds the text of each corpus."""
