"""The processes of one run, which connect, agree, wait for each other and end together.

Each process runs the same program on its own devices, and arrays are sharded over all devices.
Process 0 reads the files that decisions depend on. It also writes all files except the arrays of
checkpoints:

    process 0    on_process_zero(work) ──▶ work() ──┐ result or error
    process 1..  on_process_zero(work) ─────────────┴──▶ the same result, or OtherProcessError

With one process these functions cost nothing.
"""

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from txl_jax.config import ConfigError
from txl_jax.messages import UserError, short_repr, truncate

T = TypeVar("T")

_SHUTDOWN_SECONDS = 24 * 3600  # other processes wait, since process 0 might still write
_alone = threading.local()  # ``working``: whether process 0 works while the others wait for it


class OtherProcessError(UserError, RuntimeError):
    """Raised if another process of the run failed, since all processes end together."""


def initialise(
    distributed: bool,
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    heartbeat_seconds: int = 60,
    takes_notice: bool = True,
) -> None:
    """Joins the processes of a run. Call this before anything uses a device.

    Args:
      distributed: whether to find the processes through Slurm, Open MPI, a TPU pod or GKE.
      coordinator: HOST:PORT, a free port of the machine where process 0 runs. It needs the next
        two arguments. If it is given, JAX does not look for a cluster.
      num_processes, process_id: N, and the number of this process, 0 to N-1.
      heartbeat_seconds: after this time without a sign of life, a process counts as dead, and JAX
        ends the other processes.
      takes_notice: whether SIGTERM to one process notifies all (training/preemption.py).

    Raises ConfigError if flags contradict each other, or if no cluster or connection is found.
    """
    check_flags(coordinator, num_processes, process_id)
    if not distributed and coordinator is None:
        return
    logging.getLogger("jax._src.distributed").setLevel(logging.WARNING)  # no connection messages
    jax.config.update("jax_enable_preemption_service", takes_notice)
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator,
            num_processes=num_processes,
            process_id=process_id,
            # Otherwise a cluster's variables limit each process to one device of its machine.
            cluster_detection_method=None if coordinator is None else "deactivate",
            heartbeat_timeout_seconds=heartbeat_seconds,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except ValueError as error:
        raise ConfigError(
            "--distributed: JAX finds no Slurm, Open MPI, TPU pod or GKE that names the processes"
            f" of the run ({error}); give --coordinator=HOST:PORT --num_processes=N --process_id=I"
        ) from error
    except RuntimeError as error:  # JAX's runtime raises it for network errors
        flag = "--distributed" if coordinator is None else f"--coordinator={coordinator}"
        fix = "check that process 0 has started, and that the machines reach each other"
        raise ConfigError(f"{flag}: cannot join the other processes: {error}; {fix}") from error


def check_flags(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Raises ConfigError if the flags of the coordinator are incomplete or out of range."""
    if coordinator is None and num_processes is None and process_id is None:
        return
    if coordinator is None or num_processes is None or process_id is None:
        raise ConfigError(
            "--coordinator=HOST:PORT, --num_processes=N and --process_id=I: give all three or none"
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        why = "must be HOST:PORT, such as node0:12345"
        raise ConfigError(f"--coordinator={truncate(coordinator)}: {why}")
    if not 0 <= process_id < num_processes:
        why = f"must be from 0 to --num_processes - 1 = {num_processes - 1}"
        raise ConfigError(f"--process_id={short_repr(process_id)}: {why}")


def many() -> bool:
    """Returns whether the run has several processes; if it has one, this starts no device."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_process_zero() -> bool:
    """Returns whether this process prints, and writes the files of the run."""
    return not many() or jax.process_index() == 0


def print_once(text: str | None, file: TextIO | None = None) -> None:
    """Prints a text that is not empty in process 0, on standard output or in ``file``."""
    if text and is_process_zero():
        print(text, file=file or sys.stdout, flush=True)


def on_process_zero(work: Callable[[], T]) -> T:
    """Runs ``work()`` on process 0 only, and returns its result on all processes.

    The result must be a JSON value; tuples become lists. If ``work`` raises an error,
    process 0 raises this error and the others raise OtherProcessError. ``work`` must not wait for
    other processes. If ``work`` calls this function, a RuntimeError is raised, even with one
    process.
    """
    _check_not_alone()
    if not many():
        return _run_alone(work)
    failed: Exception | None = None
    message: dict[str, Any] = {}
    if is_process_zero():
        try:
            message = {"result": _run_alone(work)}
            json.dumps(message)
        except Exception as error:  # sent to the others and raised below
            failed, message = error, {"error": f"{type(error).__name__}: {error}"}
    answer = json.loads(_broadcast(json.dumps(message).encode()))
    if failed is not None:
        raise failed
    if "error" in answer:
        raise OtherProcessError(f"process 0 failed: {answer['error']}")
    return answer["result"]


def _run_alone(work: Callable[[], T]) -> T:
    _alone.working = True
    try:
        return work()
    finally:
        _alone.working = False


def _check_not_alone() -> None:
    if getattr(_alone, "working", False):
        raise RuntimeError("work that runs on process 0 alone must not wait for other processes")


def process_zero_first(work: Callable[[], T]) -> T:
    """Runs ``work()`` on process 0, then on all others at once; each returns its own result.

    So the others find the files that process 0 has written to a shared disk. Raises
    OtherProcessError if ``work`` failed on another process and not on this one.
    """
    results: list[T] = []
    failed: Exception | None = None
    append = lambda: results.append(work())
    on_process_zero(append)
    if not is_process_zero():
        try:
            append()
        except Exception as error:  # raised below, once the others know
            failed = error
    where = failing(failed is not None)
    if failed is not None:
        raise failed
    if where:
        raise OtherProcessError(f"process {where[0]} failed; read the error that it printed")
    return results[0]


def failing(failed: bool) -> list[int]:
    """Returns the numbers of the processes that ``failed``; all processes must call this."""
    _check_not_alone()
    if not many():
        return [0] if failed else []
    flags = multihost_utils.process_allgather(np.array([failed]))
    return [int(process) for process in np.flatnonzero(flags)]


def placed(tree: Any, shardings: Any) -> Any:
    """Applies ``jax.device_put`` to global arrays, or to arrays that every process has in full."""
    if not many():
        return jax.device_put(tree, shardings)

    def place(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return jax.device_put(x, sharding)
        array = np.asarray(x)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(place, tree, shardings)


def abort(code: int) -> None:
    """Ends a failed process without waiting for the others; does nothing in a single process."""
    if not many():
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, SystemExit):  # nobody reads what a failed process printed
            stream.flush()
    if is_process_zero():
        time.sleep(1)  # process 0 ends the others: lets them print their last messages
    os._exit(code)


def _broadcast(message: bytes) -> bytes:
    """Returns the message of process 0; its size is sent first, as arrays need equal shapes."""
    size = int(multihost_utils.broadcast_one_to_all(np.array(len(message), np.int32)))
    row = np.frombuffer(message if is_process_zero() else bytes(size), np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(row)).tobytes()
