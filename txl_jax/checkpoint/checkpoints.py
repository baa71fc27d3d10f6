"""Saves and restores checkpoints: all state that a run needs to resume, with checksums of files.

Orbax writes them asynchronously and commits each one atomically, in one layout for every run:

    checkpoints/<step>/params/ optimizer/ mems/   arrays
    checkpoints/<step>/average_<name>/            averaged parameters, if there are any
    checkpoints/<step>/meta/                      format, config, log window (JSON)
    checkpoints/<step>/metrics/                   validation loss (JSON)
    checkpoints/<step>/checksums.json             sha256 of every file above

A checkpoint that does not match its checksums is renamed to ``damaged-<step>`` and never deleted.
The checkpoint before it is used instead. With many processes, each process saves and restores the
parts of arrays that its devices hold, in one shared folder. Process 0 does all other work.
"""

import contextlib
import math
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging

from txl_jax import paths
from txl_jax.checkpoint import orbax_items
from txl_jax.checkpoint.checkpoint_folder import METRIC, CheckpointFolder, write_manifest
from txl_jax.checkpoint.errors import CheckpointError
from txl_jax.checkpoint.orbax_items import RAW
from txl_jax.checkpoint.workdir_files import FORMAT, check_path
from txl_jax.config import CheckpointConfig, differing_keys
from txl_jax.files import write_failure_reason
from txl_jax.parallel import processes
from txl_jax.parallel.processes import on_process_zero


class Checkpoints(contextlib.AbstractContextManager):
    """Saves and restores the checkpoints of one workdir.

    ``c`` says which checkpoints to keep. With ``None``, this class only reads checkpoints.
    """

    def __init__(self, workdir: str, c: CheckpointConfig | None = None):
        self._folder = CheckpointFolder(workdir)
        self._options = orbax_items.options(c, self._before_commit)
        self._manager: ocp.CheckpointManager | None = None
        # the step of a save under way, and the number of arrays in each item (such as ``params``)
        self._saving: tuple[int, dict[str, int]] | None = None
        self._failed = False  # whether a save failed and this process removed its files
        if c is not None:
            on_process_zero(self._folder.finish_replacing)
            on_process_zero(self._folder.remove_temporary)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _opened(self) -> ocp.CheckpointManager:
        """Returns Orbax's manager; the first use opens it, which reads the folder."""
        if self._manager is None:
            logging.set_stderrthreshold("error")
            check_path(self._folder.path)
            folder = paths.path(self._folder.path)
            self._manager = orbax_items.Manager(folder, options=self._options)
        return self._manager

    def _before_commit(self) -> None:
        """Checks the files of a checkpoint and writes its manifest.

        Orbax calls this method in process 0 when all items are on disk. An error here fails the
        save, so nothing is committed.
        """
        assert self._saving is not None, "a save is under way"
        step, counts = self._saving
        folder = self._folder.temporary_path(step)
        orbax_items.check_listed(folder, counts)
        write_manifest(folder)

    def steps(self) -> list[int]:
        """Returns the steps of committed checkpoints, oldest first. All processes must call it."""
        return on_process_zero(self._folder.steps)

    def choose(self, which: str = "best") -> int:
        """Returns the step of ``best``, ``latest`` or a number, see :class:`CheckpointFolder`."""
        return on_process_zero(lambda: self._folder.choose(which))

    def save(self, step: int, state: Any, meta: dict[str, Any], valid_loss: float | None) -> None:
        """Copies the state and starts threads that save it, or raises CheckpointError."""
        self._save_items(step, orbax_items.state_items(state), meta, valid_loss)

    def save_params(self, step: int, params: Any, meta: dict[str, Any]) -> None:
        """Saves parameters only, as :meth:`save` does; training cannot resume from them."""
        self._save_items(step, {"params": params}, {**meta, "params_only": True}, None)

    def _save_items(
        self, step: int, arrays: dict[str, Any], meta: dict[str, Any], valid_loss: float | None
    ) -> None:
        items: dict[str, Any] = {k: ocp.args.StandardSave(v) for k, v in arrays.items()}
        items["meta"] = ocp.args.JsonSave({"format": FORMAT, "step": step, **meta})
        metrics = {METRIC: math.inf if valid_loss is None else valid_loss}
        try:
            manager = self._opened()
            self._finish_save()  # _before_commit of the previous save reads self._saving
            if self._failed:  # Orbax's threads may have written files since
                self._folder.remove_temporary()
            self._saving = step, {k: len(jax.tree.leaves(v)) for k, v in arrays.items()}
            saved = manager.save(step, args=ocp.args.Composite(**items), metrics=metrics)
        except Exception as error:  # Orbax and its threads raise many types
            raise self._save_error(f"checkpoint {step}", error) from error
        if not saved:
            raise CheckpointError(
                f"checkpoint {step} was not saved in {self._folder.path}: there is a checkpoint of"
                " the same or a later step"
            )

    def replace(
        self, step: int, state: Any, meta: dict[str, Any], valid_loss: float | None
    ) -> None:
        """Saves a step again, and removes the old checkpoint once the new one is complete."""
        self.close()
        on_process_zero(lambda: self._folder.begin_replacing(step))
        try:
            self.save(step, state, meta, valid_loss)
            self.wait()
        except CheckpointError:
            if not processes.many():  # many processes end here, and their next start does this
                self._folder.finish_replacing()
            raise
        on_process_zero(self._folder.finish_replacing)

    def wait(self) -> None:
        """Waits until every checkpoint is on disk; raises CheckpointError if a save failed."""
        try:
            self._finish_save()
        except Exception as error:  # Orbax's threads raise many types
            raise self._save_error("a checkpoint", error) from error

    def _finish_save(self) -> None:
        """Waits for Orbax, whose threads can fail silently, and checks that the checkpoint exists.

        Only process 0 checks, because other processes may see a new file in a shared folder late.
        """
        if self._manager is not None:
            self._manager.wait_until_finished()  # after an interrupt the save continues
        saving, self._saving = self._saving, None
        if saving and processes.is_process_zero() and saving[0] not in self._folder.steps():
            raise CheckpointError(f"the files of step {saving[0]} are missing after the save")

    def _save_error(self, what: str, error: Exception) -> CheckpointError:
        """Returns the error of a failed save; a single process first removes the save's files."""
        self._saving = None
        if not processes.many():  # the other processes cannot be waited for here
            if self._manager is not None:
                with contextlib.suppress(Exception):  # it raises the error of the save again
                    self._manager.close()
                self._manager = None
            self._failed = True
            self._folder.remove_temporary()
        steps = self._folder.steps()
        kept = f"checkpoint {max(steps)} is intact" if steps else "there is no other checkpoint"
        known = isinstance(error, CheckpointError)
        reason = str(error) if known else write_failure_reason(error)
        return CheckpointError(f"{what} cannot be written in {self._folder.path}: {reason}; {kept}")

    def close(self) -> None:
        """Waits for running saves and closes Orbax; the next use reads the folder again."""
        self.wait()
        if self._failed:
            self._folder.remove_temporary()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def restore(
        self, abstract: Any, config: dict[str, Any], upto: int | None = None
    ) -> tuple[Any, dict[str, Any]] | None:
        """Returns the newest intact state and its metadata, or ``None`` if there is no checkpoint.

        ``abstract`` has the shapes, dtypes and shardings of the state, and ``config`` the settings
        of this run. Steps after ``upto`` are ignored. Raises CheckpointError if the checkpoint has
        another config, another format, or parameters only, or if all checkpoints are damaged.
        """
        for step in reversed([s for s in self.steps() if upto is None or s <= upto]):
            meta, fault = self._checked_meta(step)
            if fault is not None:
                self.close()
                on_process_zero(lambda: self._folder.move_aside(step, fault))  # noqa: B023  (called at once)
                continue
            self._check_config(step, meta, config)
            state, error = None, None
            try:
                items = self._restore_items(step, orbax_items.state_items(abstract))
                state = orbax_items.state_from_items(step, items, abstract)
            except Exception as caught:  # Orbax raises many types
                error = caught
            if processes.failing(error is not None):
                raise CheckpointError(
                    f"checkpoint {step} in {self._folder.path} is intact but does not fit this"
                    f" run: {error or 'another process cannot read it'}; train in another workdir"
                ) from error
            return state, meta
        damaged = on_process_zero(self._folder.damaged)
        if damaged and not self.steps():
            raise CheckpointError(
                f"no checkpoint in {self._folder.path} is intact, and to begin again would discard"
                f" the records of the run; repair {damaged[-1]}, or train in another workdir"
            )
        return None

    def remove_after(self, step: int) -> None:
        """Removes checkpoints of later steps; a run that resumes at ``step`` saves them again."""
        self.close()
        on_process_zero(lambda: self._folder.remove_after(step))

    def _restore_items(self, step: int, shapes: dict[str, Any]) -> Any:
        items = {name: ocp.args.StandardRestore(shape) for name, shape in shapes.items()}
        return self._opened().restore(step, args=ocp.args.Composite(**items))

    def restore_params(
        self, step: int, abstract: Any, weights: str | None = None
    ) -> tuple[Any, str, tuple[str, ...]]:
        """Returns parameters of a step, their name, and the names of the step's other parameters.

        A step has the parameters ``raw`` and perhaps averages. ``weights`` names one of these; by
        default, the parameters that training chose are returned. Raises CheckpointError if the
        checkpoint has no parameters of this name, is damaged or cannot be read.
        """
        where = f"checkpoint {step} in {self._folder.path}"
        meta, fault = self._checked_meta(step)
        if fault is not None:
            fix = "resume training from the checkpoint before it, or name another step"
            raise CheckpointError(f"{where} {fault}; {fix}")
        names = meta.get("candidates", [RAW])
        weights = weights or meta.get("weights", RAW)
        if weights not in names:
            raise CheckpointError(f"{where} has no {weights!r} parameters, only {', '.join(names)}")
        item = orbax_items.params_item(weights)
        try:
            params = self._restore_items(step, {item: abstract})[item]
        except Exception as error:  # Orbax raises many types
            raise CheckpointError(f"{where} cannot be read: {error}") from error
        return params, weights, tuple(name for name in names if name != weights)

    def _checked_meta(self, step: int) -> tuple[dict[str, Any], str | None]:
        """Returns a step's metadata and fault, or raises CheckpointError if its format differs."""
        meta, fault = on_process_zero(lambda: self._folder.meta(step))
        if fault is not None:
            return meta, fault
        if meta["format"] != FORMAT:
            raise CheckpointError(
                f"checkpoint {step} has format {meta['format']}, and this version of txl_jax reads"
                f" format {FORMAT} only; use the version that wrote it, or another workdir"
            )
        return meta, on_process_zero(lambda: self._folder.fault(step))

    def _check_config(self, step: int, meta: dict[str, Any], config: dict[str, Any]) -> None:
        """Raises CheckpointError if a run with this config cannot resume from the checkpoint."""
        if different := differing_keys(meta["config"], config):
            raise CheckpointError(
                f"checkpoint {step} has another config: {'; '.join(different)}. Use another"
                " workdir, or the checkpoint's values"
            )
        if meta.get("params_only"):
            raise CheckpointError(
                f"checkpoint {step} in {self._folder.path} has parameters but no optimizer state,"
                " so training cannot resume from it; name this workdir in train.start_from, and"
                " train in another one"
            )
