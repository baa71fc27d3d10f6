"""Programs that measure; the numbers they gave lie in ``results/``, with machine and versions."""
