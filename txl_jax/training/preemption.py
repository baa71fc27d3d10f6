"""Being told to stop: SIGTERM and Ctrl-C end a run at the next step, saved.

Of many processes each may be told, and all must stop at the same step: SIGTERM is left to JAX,
which tells the others and names the step. Ctrl-C is passed on to it.
"""

import signal
from types import FrameType, TracebackType

from txl_jax.parallel import processes


class PreemptionGuard:
    """Notes SIGTERM and SIGINT while it is entered; a second Ctrl-C interrupts at once.

    Attributes:
      signal: the first signal that came, or ``None``. Of many processes: SIGTERM too where
        another one was told.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[int, object] = {}
        self._interrupted, self._asked = False, 0

    def __enter__(self) -> "PreemptionGuard":
        own = (signal.SIGINT,) if processes.many() else (signal.SIGTERM, signal.SIGINT)
        for number in own:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def requested(self) -> bool:
        """Whether to stop. All processes ask at the same places, and get the same answer."""
        if self.signal is None and processes.many():
            self._asked += 1
            if processes.notice_taken(self._asked):
                self.signal = signal.SIGINT if self._interrupted else signal.SIGTERM
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 0 after SIGTERM: saved and done as asked."""
        return 130 if self.signal == signal.SIGINT else 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._interrupted = self._interrupted or number == signal.SIGINT
        if processes.many():
            signal.raise_signal(signal.SIGTERM)  # for JAX, which tells all
        else:
            self.signal = signal.Signals(number)
