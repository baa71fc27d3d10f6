"""Being told to stop: SIGTERM and Ctrl-C end a run at the next step, saved."""

import signal
from types import FrameType, TracebackType


class Stop:
    """Notes SIGTERM and SIGINT while it is entered; a second Ctrl-C interrupts at once.

    Attributes:
      signal: the first signal that came, or ``None``.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Stop":
        for number in (signal.SIGTERM, signal.SIGINT):
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
        """Whether to stop."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 0 after SIGTERM: saved and done as asked."""
        return 130 if self.signal == signal.SIGINT else 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
