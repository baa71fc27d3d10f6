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
"""Signals of closed terminals, and of schedulers before a limit; by default they end a process."""


class PreemptionGuard:
    """Records the first signal that asks to stop in ``signal``: SIGTERM, SIGINT or a warning.

    A second Ctrl-C raises KeyboardInterrupt. Warnings that the process ignores, as it does SIGHUP
    under ``nohup``, stay ignored. Outside the main thread, which alone receives signals, the guard
    handles none. With several processes, ``signal`` is SIGTERM if only others received a signal.
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
        # None: a handler that is not Python's, and could not be restored
        given = [n for n in WARNINGS if signal.getsignal(n) not in (signal.SIG_IGN, None)]
        for number in (*own, *given):
            self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def requested(self) -> bool:
        """Tells whether to stop. All processes must call this equally often; the answers agree."""
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
