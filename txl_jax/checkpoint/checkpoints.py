"""Checkpoints: everything a run needs to go on, sealed by a hash of every file.

Layout, one for every way of running (Orbax writes it, asynchronously and atomically):

    checkpoints/<step>/params/ optimizer/ mems/   arrays
    checkpoints/<step>/average_<name>/            means of the parameters, where there are any
    checkpoints/<step>/meta/                      format, config, corpus, log window (JSON)
    checkpoints/<step>/checksums.json  sealed          sha256 of every file above (seals.py)

A checkpoint whose files do not match its seal is moved aside as ``damaged-<step>``, never
deleted, and the one before it is used; so is one whose seal was deleted. One that was never sealed
(the process died between commit and seal) is complete, is used, and is sealed when it was restored.

Of many processes all save and restore, each the parts of arrays that its devices hold, in one
folder that all see. The first alone writes the seal, decides what is restored, and moves folders.
"""

import contextlib
import json
import os
import shutil
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from txl_jax.checkpoint.checksums import ManifestWriter, fault, has_manifest, write_missing_manifest
from txl_jax.checkpoint.errors import CheckpointError
from txl_jax.checkpoint.retention import METRIC, Manager, options
from txl_jax.config import CheckpointConfig, differing_keys
from txl_jax.files import json_object, why_not_written
from txl_jax.messages import shortened
from txl_jax.parallel import processes

FORMAT = 1
RAW = "raw"
"""The name of the parameters as the last update left them."""
_REPLACED = "replaced-"
_UNFINISHED = ".orbax-checkpoint-tmp"


class Checkpoints:
    """The checkpoints of one workdir.

    Args:
      workdir: where ``checkpoints/`` is or will be.
      c: what is kept. ``None``: for reading only, nothing is ever removed.
    """

    def __init__(self, workdir: str, c: CheckpointConfig | None = None):
        self.folder = os.path.abspath(os.path.join(workdir, "checkpoints"))
        self._options = options(c)
        self._manager: ocp.CheckpointManager | None = None
        self._manifests = ManifestWriter()
        if c is not None:
            processes.on_process_zero(self._finish_replacing)
            processes.on_process_zero(self._clear_unfinished)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def manager(self) -> ocp.CheckpointManager:
        """Orbax's manager, opened when first needed."""
        if self._manager is None:
            logging.set_stderrthreshold("error")
            self._manager = Manager(self.folder, options=self._options)
        return self._manager

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, oldest first; to be asked for by all processes."""
        return processes.on_process_zero(self._steps)

    def _steps(self) -> list[int]:
        if not os.path.isdir(self.folder):
            return []
        return sorted(int(n) for n in os.listdir(self.folder) if n.isascii() and n.isdigit())

    def save(self, step: int, state: Any, meta: dict[str, Any], valid_loss: float | None) -> None:
        """Starts saving; returns as soon as the state has been copied.

        Raises:
          CheckpointError: nothing could be written (a full disk, a lost folder).
        """
        items = {
            "params": ocp.args.StandardSave(state.params),
            "optimizer": ocp.args.StandardSave(state.opt_state),
            "mems": ocp.args.StandardSave(_mems_item(state)),
            "meta": _meta_item(step, meta),
        }
        for name, mean in state.averages.items():
            items[_item_of(name)] = ocp.args.StandardSave(mean)
        self._start(step, items, valid_loss)

    def save_params(self, step: int, params: Any, meta: dict[str, Any]) -> None:
        """As :meth:`save`, of parameters alone: a model to be run, no run to be gone on with."""
        items = {
            "params": ocp.args.StandardSave(params),
            "meta": _meta_item(step, {**meta, "params_only": True}),
        }
        self._start(step, items, None)

    def _start(self, step: int, items: dict[str, Any], valid_loss: float | None) -> None:
        metrics = {METRIC: float("inf") if valid_loss is None else valid_loss}
        try:
            saved = self.manager.save(step, args=ocp.args.Composite(**items), metrics=metrics)
        except Exception as error:  # Orbax raises many types, and what its threads met
            raise self._not_written(f"checkpoint {step}", error) from error
        if not saved:
            raise CheckpointError(
                f"checkpoint {step} in {self.folder} was not saved: one of the same or a later"
                " step is there"
            )
        if processes.is_process_zero():
            self._manifests.write(self._at(step))

    def replace(
        self, step: int, state: Any, meta: dict[str, Any], valid_loss: float | None
    ) -> None:
        """Saves a step that is there already; the old one goes only when the new one is whole."""
        self.close()
        replaced = os.path.join(self.folder, f"{_REPLACED}{step}")
        processes.on_process_zero(lambda: os.rename(self._at(step), replaced))
        try:
            self.save(step, state, meta, valid_loss)
            self.wait()
        except CheckpointError:
            if not processes.many():  # a run of many ends here, and its next start does this
                self._finish_replacing()
            raise
        processes.on_process_zero(self._finish_replacing)

    def wait(self) -> None:
        """Until everything started is on disk and sealed.

        Raises:
          CheckpointError: a save failed after it had started.
        """
        try:
            if self._manager is not None:
                self._manager.wait_until_finished()
        except Exception as error:  # Orbax raises what its threads met, of any type
            raise self._not_written("a checkpoint", error) from error
        finally:
            self._manifests.join()
        unsealed = self._manifests.error()
        if unsealed is not None:
            raise self._not_written("the seal of a checkpoint", unsealed) from unsealed

    def _not_written(self, what: str, error: Exception) -> CheckpointError:
        """The error of a failed save, once what it left is gone and a new one could be tried."""
        if not processes.many():  # nor can the others be waited for here
            if self._manager is not None:
                with contextlib.suppress(Exception):  # what it meets is the same error again
                    self._manager.close()
                self._manager = None
            self._clear_unfinished()
        there = self._steps()
        kept = f"checkpoint {max(there)} is intact" if there else "there is no other"
        return CheckpointError(
            f"{what} cannot be written in {self.folder}: {why_not_written(error)}; {kept}"
        )

    def close(self) -> None:
        """Waits for running saves and lets go of the folder."""
        self.wait()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def restore(
        self, abstract: Any, config: dict[str, Any], upto: int | None = None
    ) -> tuple[Any, dict[str, Any]] | None:
        """The newest intact state and its meta, or ``None`` where there is none.

        Args:
          abstract: shapes and dtypes, with the shardings that are wanted.
          config: of this run, to hold against the checkpoint's.
          upto: later steps are passed over.

        Raises:
          CheckpointError: the checkpoint is of another config, of a newer format, or holds
            parameters only.
        """
        for step in reversed(self.steps()):
            if upto is not None and step > upto:
                continue
            meta = self._meta_if_intact(step)
            if meta is None:
                continue
            _refuse_other_config(step, meta, config)
            if meta.get("params_only"):
                raise CheckpointError(
                    f"checkpoint {step} in {self.folder} holds parameters and no optimizer:"
                    " training cannot go on from it"
                )
            failed: Exception | None = None
            try:
                state = self._restore_state(step, abstract)
            except Exception as error:  # Orbax raises many types for damaged files
                failed = error
            if not processes.failing(failed is not None):
                processes.on_process_zero(lambda: write_missing_manifest(self._at(step)))  # noqa: B023  (called at once)
                return state, meta
            if processes.on_process_zero(lambda: has_manifest(self._at(step))):  # noqa: B023  (called at once)
                raise CheckpointError(
                    f"checkpoint {step} in {self.folder} is intact but does not fit this"
                    f" program: {failed or 'another process cannot read it'}"
                ) from failed
            self._set_aside(step, f"cannot be read ({type(failed).__name__})")
        return None

    def restore_params(self, step: int, abstract: Any, weights: str = RAW) -> Any:
        """The parameters of a step alone, or a mean of them by its name.

        Raises:
          CheckpointError: they are not there, are damaged, are of a newer format, or do not fit.
        """
        self._refuse_damaged(step)
        meta, wrong = processes.on_process_zero(lambda: self._read_meta(step))
        if wrong is None:
            _refuse_newer(step, meta)
        item, there = _item_of(weights), meta.get("candidates", [RAW])
        if weights not in there:
            raise CheckpointError(
                f"checkpoint {step} in {self.folder} has no {weights!r} parameters, only"
                f" {', '.join(there)}"
            )
        try:
            items = ocp.args.Composite(**{item: ocp.args.StandardRestore(abstract)})
            params = self.manager.restore(step, args=items)[item]
        except Exception as error:  # as in restore
            raise CheckpointError(
                f"checkpoint {step} in {self.folder} cannot be read: {error}"
            ) from error
        processes.on_process_zero(lambda: write_missing_manifest(self._at(step)))
        return params

    def weights(self, step: int) -> tuple[str, list[str]]:
        """Which parameters of a step are the model, and what else there is; by name."""
        meta, _ = processes.on_process_zero(lambda: self._read_meta(step))
        chosen = meta.get("weights", RAW)
        return chosen, [name for name in meta.get("candidates", [RAW]) if name != chosen]

    def choose(self, which: str = "best") -> int:
        """The step that ``best`` (by validation), ``latest`` or a number names.

        Raises:
          CheckpointError: there is none.
        """
        return processes.on_process_zero(lambda: self._choose(which))

    def _choose(self, which: str) -> int:
        steps = self._steps()
        if not steps:
            raise CheckpointError(f"there is no checkpoint in {self.folder}; train first")
        if which == "latest":
            return steps[-1]
        if which == "best":
            losses = {s: self.valid_loss(s) for s in steps}
            scored = {s: v for s, v in losses.items() if v is not None}
            return min(scored, key=lambda s: scored[s]) if scored else steps[-1]
        named = {str(step): step for step in steps}
        if which not in named:
            raise CheckpointError(
                f"there is no checkpoint {shortened(which)} in {self.folder}, only"
                f" {', '.join(named)}"
            )
        return named[which]

    def valid_loss(self, step: int) -> float | None:
        """Validation loss in nats that was saved with a step; ``None`` where not measured."""
        path = os.path.join(self._at(step), "metrics", "metrics")
        try:
            with open(path, encoding="utf-8") as file:
                value = float(json.load(file)[METRIC])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return value if value != float("inf") else None

    # ------------------------------------------------------------------ one checkpoint

    def _restore_state(self, step: int, abstract: Any) -> Any:
        means = {
            _item_of(name): ocp.args.StandardRestore(mean)
            for name, mean in abstract.averages.items()
        }
        items = ocp.args.Composite(
            params=ocp.args.StandardRestore(abstract.params),
            optimizer=ocp.args.StandardRestore(abstract.opt_state),
            mems=ocp.args.StandardRestore(_mems_item(abstract)),
            **means,
        )
        got = self.manager.restore(step, args=items)
        hidden = got["mems"].get("hidden")
        if hidden is None:  # M = 0: nothing was stored
            shape = abstract.mems.hidden
            hidden = processes.placed(np.zeros(shape.shape, shape.dtype), shape.sharding)
        mems = abstract.mems.replace(hidden=hidden, filled=got["mems"]["filled"])
        number = processes.placed(np.asarray(step, "int32"), abstract.step.sharding)
        averages = {name: got[_item_of(name)] for name in abstract.averages}
        return abstract.replace(
            step=number,
            params=got["params"],
            opt_state=got["optimizer"],
            mems=mems,
            averages=averages,
        )

    def _meta_if_intact(self, step: int) -> dict[str, Any] | None:
        wrong = processes.on_process_zero(lambda: fault(self._at(step)))
        if wrong is None:
            meta, wrong = processes.on_process_zero(lambda: self._read_meta(step))
            if wrong is None:
                return meta
        self._set_aside(step, wrong)
        return None

    def _read_meta(self, step: int) -> tuple[dict[str, Any], str | None]:
        """What stands in ``meta``, or what is wrong with it."""
        path = os.path.join(self._at(step), "meta", "metadata")
        try:
            with open(path, "rb") as file:
                meta = json_object(file.read())
        except (OSError, ValueError) as error:
            return {}, f"has no readable meta ({type(error).__name__})"
        if not isinstance(meta.get("config"), dict) or type(meta.get("format", 0)) is not int:
            return {}, "has no readable meta (no config or format)"
        return meta, None

    def _refuse_damaged(self, step: int) -> None:
        wrong = processes.on_process_zero(lambda: fault(self._at(step)))
        if wrong is not None:
            raise CheckpointError(
                f"checkpoint {step} in {self.folder} {wrong}; resume training to fall back to the"
                " one before it, or name another step"
            )

    def _at(self, step: int) -> str:
        return os.path.join(self.folder, str(step))

    def _set_aside(self, step: int, wrong: str) -> None:
        if self._manager is not None:
            self._manager.close()
            self._manager = None
        processes.on_process_zero(lambda: self._move_aside(step, wrong))

    def _move_aside(self, step: int, wrong: str) -> None:
        name, count = f"damaged-{step}", 1
        while os.path.exists(os.path.join(self.folder, name)):
            count += 1
            name = f"damaged-{step}-{count}"
        os.rename(self._at(step), os.path.join(self.folder, name))
        print(
            f"checkpoint {step} {wrong}; moved aside to checkpoints/{name}, falling back to the"
            " one before it",
            flush=True,
        )

    def _finish_replacing(self) -> None:
        """Puts back what a process that died inside :meth:`replace` had moved."""
        there = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        for name in there:
            old, step = os.path.join(self.folder, name), name.removeprefix(_REPLACED)
            if name != step and step in there:
                shutil.rmtree(old)
            elif name != step:
                os.rename(old, os.path.join(self.folder, step))

    def _clear_unfinished(self) -> None:
        """Removes what a save that failed, or whose process died, has left half-written."""
        for name in os.listdir(self.folder) if os.path.isdir(self.folder) else []:
            if _UNFINISHED in name:
                shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)


def _refuse_other_config(step: int, meta: dict[str, Any], config: dict[str, Any]) -> None:
    _refuse_newer(step, meta)
    different = differing_keys(meta["config"], config)
    if different:
        raise CheckpointError(
            f"checkpoint {step} is of another config: {'; '.join(different)}. Use another"
            " --workdir, or the checkpoint's values"
        )


def _refuse_newer(step: int, meta: dict[str, Any]) -> None:
    if meta.get("format", 0) > FORMAT:
        raise CheckpointError(
            f"checkpoint {step} has format {meta['format']}, newer than this program's {FORMAT};"
            " update txl_jax"
        )


def _item_of(weights: str) -> str:
    """Under which name parameters of that name stand in a checkpoint."""
    return "params" if weights == RAW else f"average_{weights}"


def _meta_item(step: int, meta: dict[str, Any]) -> Any:
    return ocp.args.JsonSave({"format": FORMAT, "step": step, **meta})


def _mems_item(state: Any) -> dict[str, Any]:
    """Memory as Orbax takes it: arrays without elements are left out."""
    mems = {"hidden": state.mems.hidden, "filled": state.mems.filled}
    return {k: v for k, v in mems.items() if v.size}
