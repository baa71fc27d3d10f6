"""The settings of exporting a model as programs that run without this library."""

import dataclasses

from txl_jax.config.bounds import LENGTH, ROWS
from txl_jax.config.fields import Section, at_least, file_path


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig(Section, key="export"):
    """Settings of exporting a model (``--mode=export``, docs/export.md)."""

    folder: str | None = file_path(None)
    """New or empty folder to write; None is the folder export in the workdir."""
    batch_size: int | None = at_least(1, None, ROWS)
    """B, the number of rows of a call; None lets each call have any number of rows."""
    seg_len: int = at_least(1, 128, LENGTH)
    """T, the number of tokens of a row in a call; rows with fewer tokens are padded."""
    mem_len: int = at_least(1, 512, LENGTH)
    """M, the memory length; models without memory have none."""
