"""Logs a run to Weights & Biases, if ``train.wandb`` names a project."""

import html
import os
import secrets
import tempfile
from collections.abc import Mapping
from typing import Any

from txl_jax.config import ConfigError
from txl_jax.files import atomic_write
from txl_jax.library_errors import import_optional
from txl_jax.paths import is_remote, make_folder, path
from txl_jax.training.events import Logger


class WandbRun(Logger):
    """A run of Weights & Biases. A resumed run continues it: its id is in ``workdir/wandb/id``.

    Raises ConfigError if the package ``wandb`` is not installed, or if a run cannot be started.
    """

    def __init__(self, project: str):
        missing = ConfigError(
            f"config key train.wandb = {project!r}: the package wandb is not installed; run pip"
            " install 'txl_jax[wandb]', or leave the key out"
        )
        self._wandb, self._project = import_optional("wandb", missing), project

    def start(self, workdir: str, config: Mapping[str, Any], step: int) -> None:
        """Starts the run, or continues the run of this workdir."""
        made = path(workdir, "wandb", "id")
        if not made.exists():
            make_folder(os.path.join(workdir, "wandb"))
            atomic_write(str(made), secrets.token_hex(4).encode())
        own = tempfile.mkdtemp() if is_remote(workdir) else workdir  # wandb writes local files
        try:
            self._run: Any = self._wandb.init(
                project=self._project,
                name=os.path.basename(workdir),
                dir=own,
                id=made.read_bytes().decode(),
                resume="allow",
                settings=self._wandb.Settings(console="off", quiet=True),
            )
        except self._wandb.errors.Error as error:
            raise ConfigError(
                f"config key train.wandb = {self._project!r}: no run can be started: {error}; run"
                " wandb login, or set WANDB_MODE=offline"
            ) from error
        self._run.config.update(config, allow_val_change=True)
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Logs numbers over ``step``, as W&B's own step cannot go back to a checkpoint."""
        self._run.log({"step": step, **values})

    def text(self, step: int, name: str, text: str) -> None:
        """Logs a text as it is."""
        self._run.log({"step": step, name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")})

    def close(self) -> None:
        """Ends the run; a later start continues it."""
        self._run.finish()
