"""Preemption: after SIGTERM or Ctrl-C, a run finishes its step, saves its state and stops.

If there are several processes, all stop at the same step. JAX handles SIGTERM and chooses the step.
Ctrl-C is passed on to JAX as SIGTERM.
"""

import signal
import threading
from types import FrameType

from jax.experimental import multihost_utils

from txl_jax.parallel import processes


class PreemptionGuard:
    """Records the first SIGTERM or SIGINT in ``signal``. A second Ctrl-C raises KeyboardInterrupt.

    Outside the main thread, which alone receives signals, it handles none. With several processes,
    ``signal`` is also SIGTERM if another process received a signal.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._handlers: dict[int, object] = {}
        self._interrupted, self._calls = False, 0

    def __enter__(self) -> "PreemptionGuard":
        if threading.current_thread() is not threading.main_thread():
            return self
        own = (signal.SIGINT,) if processes.many() else (signal.SIGTERM, signal.SIGINT)
        for number in own:
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
                self.signal = signal.SIGINT if self._interrupted else signal.SIGTERM
        return self.signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._interrupted = self._interrupted or number == signal.SIGINT
        if processes.many():
            signal.raise_signal(signal.SIGTERM)  # JAX notifies all processes
        else:
            self.signal = signal.Signals(number)
