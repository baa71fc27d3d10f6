"""Home folders in paths, and the folder of prepared corpora and compiled programs."""

import os
from pathlib import Path

from txl_jax.config.errors import ConfigError
from txl_jax.messages import short_repr


def expanded(path: str, where: str) -> Path:
    """The path with ``~`` and ``~user`` replaced by home folders.

    Raises:
      ConfigError: there is no such user, or no home folder; ``where`` names the flag or key.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        home = Path(path).parts[0]
        raise ConfigError(
            f"{where} = {short_repr(path)}: there is no home folder {short_repr(home)}; write the"
            " whole path"
        ) from error


def data_folder(cache_dir: str | None = None) -> Path:
    """Where prepared corpora and compiled programs are kept, as an absolute path.

    ``data.cache_dir``, else ``$TXL_DATA_DIR``, else ``~/.cache/txl_jax``.

    Raises:
      ConfigError: it is in the home folder of a user that does not exist.
    """
    if cache_dir:
        return expanded(cache_dir, "config key data.cache_dir").absolute()
    named = os.environ.get("TXL_DATA_DIR") or "~/.cache/txl_jax"
    return expanded(named, "environment variable TXL_DATA_DIR").absolute()
