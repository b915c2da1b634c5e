"""Times the steps of a run without making the host wait for the device in each of them."""

import time

import torch


class StepClock:
    """Measures how long steps take, without the spans in which it is paused.

    On CUDA the marks are events in the stream, so that they stand where the device is, not where the host is, which
    runs ahead. Reading the times waits for the device; setting marks does not.

    Args:
        device: The device that the steps run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[_Mark, _Mark]] = []
        self._steps: list[list[tuple[_Mark, _Mark]]] = []
        self._pauses = 0
        self._opened: _Mark | None = self._mark()

    def pause(self, discard: bool = False) -> None:
        """Stop measuring until :meth:`resume`; pauses may be nested.

        Args:
            discard: Forget the span since the last mark as well.
        """
        self._pauses += 1
        if self._opened is not None:
            if not discard:
                self._spans.append((self._opened, self._mark()))
            self._opened = None

    def resume(self) -> None:
        """Measure again, once every pause has ended."""
        self._pauses -= 1
        if self._pauses == 0:
            self._opened = self._mark()

    def end_step(self) -> None:
        """Mark the end of a step, which is the beginning of the next."""
        now = self._mark()
        if self._opened is not None:
            self._spans.append((self._opened, now))
            self._opened = now
        self._steps.append(self._spans)
        self._spans = []

    def forget(self) -> None:
        """Drop the steps that were measured and not read."""
        self._steps = []

    def take(self) -> list[float]:
        """Return the seconds of each step that ended since the last reading. Waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = [sum(_seconds(start, end) for start, end in spans) for spans in self._steps]
        self._steps = []
        return seconds

    def _mark(self) -> "_Mark":
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


_Mark = float | torch.cuda.Event


def _seconds(start: _Mark, end: _Mark) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    return start.elapsed_time(end) / 1e3  # milliseconds
