"""Analyses of trained models: context length, attention, speed, ablations, and the report page."""
