"""Loggers, which receive a run's numbers: TensorBoard (without TensorFlow), Weights & Biases."""

import contextlib
import html
import json
import os
import secrets
import struct
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from txl_jax.config import ConfigError
from txl_jax.files import append, atomic_write
from txl_jax.library_errors import import_optional
from txl_jax.paths import is_remote, make_folder, path


class Logger:
    """Receives the settings, numbers and texts of a run.

    With several processes, only the one that writes the run's files calls a logger. The methods of
    this class do nothing: a subclass overrides those that it needs. Numbers have names of the form
    ``kind/name``, such as ``train/loss`` (nats per token), ``valid/bpb`` and ``test/ppl``. A
    resumed run starts a new logger at the step of its checkpoint, and sends the numbers of later
    steps again.

    Example:
      >>> import txl_jax
      >>> class Printer(txl_jax.Logger):
      ...     def metrics(self, step, values):
      ...         print(step, sorted(values))
      >>> Printer().metrics(3, {"valid/loss": 0.5})
      3 ['valid/loss']
    """

    def start(self, workdir: str, config: Mapping[str, Any], step: int) -> None:
        """Starts to log the run in ``workdir`` at ``step``; ``config`` has the run's settings."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Logs finite numbers after ``step`` updates: those of a record, or the final scores."""

    def text(self, step: int, name: str, text: str) -> None:
        """Logs a text, such as the ``sample`` at the end of a run."""

    def close(self) -> None:
        """Ends a started log, after the final scores, an interruption or an error."""


class Loggers(Logger):
    """Passes each call on to several loggers. A logger that was not started receives nothing."""

    def __init__(self, *loggers: Logger):
        self._loggers, self._started = loggers, list[Logger]()

    def start(self, workdir: str, config: Mapping[str, Any], step: int) -> None:
        """Starts all loggers."""
        for logger in self._loggers:
            logger.start(workdir, config, step)
            self._started.append(logger)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Sends numbers to every started logger."""
        for logger in self._started:
            logger.metrics(step, values)

    def text(self, step: int, name: str, text: str) -> None:
        """Sends a text to every started logger."""
        for logger in self._started:
            logger.text(step, name, text)

    def close(self) -> None:
        """Closes all started loggers, even if an error occurs while one of them closes."""
        with contextlib.ExitStack() as stack:
            while self._started:
                stack.callback(self._started.pop().close)


class TensorBoardEvents(Logger):
    """Writes each number and text of a run to a TensorBoard file as soon as it is logged.

    On a full disk, this class raises OSError. With tensorboardX's ``SummaryWriter``, training would
    hang instead.
    """

    def start(self, workdir: str, config: Mapping[str, Any], step: int) -> None:
        """Writes the settings to a new file."""
        from tensorboardX.proto import event_pb2, summary_pb2, tensor_pb2
        from tensorboardX.record_writer import masked_crc32c

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._metadata, self._tensor = summary_pb2.SummaryMetadata, tensor_pb2.TensorProto
        self._checksum = masked_crc32c
        folder = os.path.join(workdir, "tensorboard")
        # TensorBoard reads the files in the order of their names.
        self._path = os.path.join(folder, f"events.out.tfevents.{time.time_ns()}")
        # TensorBoard hides the events of earlier files from this step on.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(
            self._event(file_version="brain.Event:2"),
            self._event(step=step + 1 if step else 0, session_log=start),
            self._text(step, "config", json.dumps(config, indent=1)),
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Writes numbers, each with its name as the tag."""
        numbers = [self._summary.Value(tag=k, simple_value=v) for k, v in values.items()]
        self._write(self._event(step=step, summary=self._summary(value=numbers)))

    def text(self, step: int, name: str, text: str) -> None:
        """Writes a text as an indented block of Markdown, so TensorBoard shows it unchanged."""
        self._write(self._text(step, name, text))

    def _text(self, step: int, name: str, text: str) -> Any:
        value = text.encode("utf-8", "replace").decode()
        block = "".join(f"    {line}\n" for line in value.splitlines())
        metadata = self._metadata(plugin_data={"plugin_name": "text"})
        tensor = self._tensor(dtype="DT_STRING", string_val=[block.encode()])
        shown = self._summary.Value(tag=name, metadata=metadata, tensor=tensor)
        return self._event(step=step, summary=self._summary(value=[shown]))

    def _write(self, *events: Any) -> None:
        """Appends events as TFRecords: size, checksum of the size, data, checksum of the data."""
        records = b""
        for event in events:
            event.wall_time = time.time()
            data = event.SerializeToString()
            for part in (struct.pack("<Q", len(data)), data):
                records += part + struct.pack("<I", self._checksum(part))
        make_folder(os.path.dirname(self._path))  # again, if a user removed the folder
        append(self._path, records)


class WandbRun(Logger):
    """Sends the numbers and texts of a run to Weights & Biases.

    The id of the run there is in ``workdir/wandb/id``, and a resumed run continues under this id.

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
                reinit="create_new",  # else several seeds would share the run of the first one
                settings=self._wandb.Settings(console="off", quiet=True),
            )
        except self._wandb.errors.Error as error:
            raise ConfigError(
                f"config key train.wandb = {self._project!r}: Weights & Biases cannot start a run:"
                f" {error}; run wandb login, or set WANDB_MODE=offline"
            ) from error
        self._run.config.update(config, allow_val_change=True)
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Logs numbers, and ``step`` as one more number, because W&B's own step cannot decrease."""
        self._run.log({"step": step, **values})

    def text(self, step: int, name: str, text: str) -> None:
        """Logs a text as it is."""
        self._run.log({"step": step, name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")})

    def close(self) -> None:
        """Ends the run; a later start continues it."""
        self._run.finish()


def make_logger(wandb_project: str | None, *more: Logger) -> Logger:
    """Returns a logger for TensorBoard, for Weights & Biases if a project is named, and ``more``.

    Raises ConfigError if a project is named and the package ``wandb`` is not installed.
    """
    project = [WandbRun(wandb_project)] if wandb_project else []
    return Loggers(TensorBoardEvents(), *project, *more)
