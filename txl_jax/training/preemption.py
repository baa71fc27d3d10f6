"""Preemption: after a signal such as SIGTERM, a run finishes its step, saves its state and stops.

If there are several processes, all stop at the same step. JAX handles SIGTERM and chooses the step.
The other signals are passed on to JAX as SIGTERM.
"""

import signal
import threading
from types import FrameType

from jax.experimental import multihost_utils

from txl_jax.parallel import processes

WARNINGS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals of a closed terminal, or of a scheduler before a time limit. By default, each of them
ends the process."""


class PreemptionGuard:
    """Stores the first signal that asks the run to stop in its attribute ``signal``.

    The guard handles SIGTERM, SIGINT and :data:`WARNINGS`. With several processes, it leaves
    SIGTERM to JAX. A second Ctrl-C raises KeyboardInterrupt. If the process ignores one of the
    WARNINGS, such as SIGHUP under ``nohup``, the guard ignores this signal too. Python handles
    signals only in the main thread, so the guard does nothing in other threads. With several
    processes, ``signal`` is SIGTERM if only another process received a signal.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._handlers: dict[int, object] = {}
        self._received: signal.Signals | None = None
        self._interrupted, self._calls = False, 0

    def __enter__(self) -> "PreemptionGuard":
        if threading.current_thread() is not threading.main_thread():
            return self
        own = (signal.SIGINT,) if processes.many() else (signal.SIGTERM, signal.SIGINT)
        # None means a handler that was not set by Python, so Python could not restore it.
        given = [n for n in WARNINGS if signal.getsignal(n) not in (signal.SIG_IGN, None)]
        for number in (*own, *given):
            self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def requested(self) -> bool:
        """Tells all processes alike whether to stop. Each must call this method equally often."""
        if self.signal is None and processes.many():
            self._calls += 1
            if multihost_utils.reached_preemption_sync_point(self._calls):
                self.signal = self._received or signal.SIGTERM
        return self.signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._interrupted = self._interrupted or number == signal.SIGINT
        self._received = self._received or signal.Signals(number)
        if processes.many():
            signal.raise_signal(signal.SIGTERM)  # JAX notifies all processes
        else:
            self.signal = self._received
