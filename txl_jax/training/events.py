"""Writes TensorBoard files without TensorFlow."""

import os
import time
from typing import Any

from txl_jax.files import name_in_os_errors


class TensorBoardEvents:
    """The TensorBoard file of a run. Every event is written at once; a full disk raises OSError.

    With tensorboardX's ``SummaryWriter``, training would hang on a full disk.
    """

    def __init__(self, folder: str, resume_step: int):
        from tensorboardX.proto import event_pb2, summary_pb2
        from tensorboardX.record_writer import RecordWriter

        self._proto, self._summary = event_pb2, summary_pb2.Summary
        # TensorBoard reads files in the order of their names. Each name must contain `tfevents`.
        self._path = os.path.join(folder, f"events.out.tfevents.{time.time_ns()}")
        with name_in_os_errors(self._path):
            os.makedirs(folder, exist_ok=True)
            self._file = RecordWriter(self._path)
        self._write(0, file_version="brain.Event:2")
        # TensorBoard hides the events of earlier files from this step on.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(resume_step + 1 if resume_step else 0, session_log=start)

    def add(self, record: dict[str, Any]) -> None:
        """Writes the numbers of a ``metrics.jsonl`` record, each with the tag ``kind/name``."""
        numbers = [
            self._summary.Value(tag=f"{record['kind']}/{name}", simple_value=value)
            for name, value in (record | record.get("timing", {})).items()
            if isinstance(value, int | float) and name not in ("step", "epoch")
        ]
        self._write(record["step"], summary=self._summary(value=numbers))

    def close(self) -> None:
        """Closes the TensorBoard file."""
        with name_in_os_errors(self._path):
            self._file.close()

    def _write(self, step: int, **content: Any) -> None:
        event = self._proto.Event(wall_time=time.time(), step=step, **content)
        with name_in_os_errors(self._path):
            self._file.write(event.SerializeToString())
            self._file.flush()
