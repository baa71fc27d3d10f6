"""Recipes: ``python -m txl_jax.main --config=configs/NAME.py``.

Each file has ``get_config()``, which returns the settings that differ from the defaults. Files
share code by relative imports, so that ``--config`` works from any folder.
"""
