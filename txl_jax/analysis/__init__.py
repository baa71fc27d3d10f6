"""Analyses of trained models: what they remember, attend to, cost and score; the report page."""
