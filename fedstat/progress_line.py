"""A progress line on standard error: the stage of a long computation and the time that remains."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, ParamSpec, TextIO, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
LONG = 5.0
"""Seconds that a computation takes at least to be told of in a notebook, where nobody asked."""
REFRESH = 0.1
WIDTH = 100


class _ProgressState(threading.local):
    """What was asked for in this thread, and the lines that are open, the outermost first."""

    def __init__(self) -> None:
        self.wanted: bool | None = None
        self.lines: list[ProgressLine] = []


_progress_state = _ProgressState()


@contextmanager
def progress(wanted: bool | None = True) -> Iterator[None]:
    """Tell on one line of the standard error how far what runs inside has come.

    Every fit, search, bootstrap and alignment tells, with rounds and the time left, once it is known; the
    argument ``progress=`` of a fit does the same for that fit. In a notebook that is the default for whatever
    takes five seconds, in one output of the cell; elsewhere nothing is written unless it was asked for. Where
    the standard error is no terminal, a line is written for every step. The environment variable
    ``FEDSTAT_PROGRESS`` (0 or 1) is the default of a process.

    Parameters
    ----------
    wanted : bool, optional
        False for silence, None for what holds outside.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> with fs.progress(False):
    ...     result = fs.GLORE.from_formula("num > 0 ~ age", partition).fit()
    >>> result.converged
    True
    """
    before = _progress_state.wanted
    _progress_state.wanted = before if wanted is None else wanted
    try:
        yield
    finally:
        _progress_state.wanted = before


def shows_progress(call: Callable[P, T]) -> Callable[P, T]:
    """Let the argument `progress` of a function hold for all that it calls."""

    @wraps(call)
    def told(*args: P.args, **kwargs: P.kwargs) -> T:
        wanted = kwargs.get("progress")
        with progress(wanted if isinstance(wanted, bool) else None):
            return call(*args, **kwargs)

    return told


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


class ProgressLine:
    """A count of steps, `total` of them where that is known; lines inside others share one line of text.

    A line of rounds (`quiet`) is told of beside the others, and alone where there are none.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.total, self.quiet = what, total, quiet
        self.at_most = False  # whether the total is a bound, which may not be reached
        self.done, self.note = 0, ""
        self.left: float | None = None
        self._stream = sys.stderr if stream is None else stream
        self._clock, self.begun = clock, clock()
        self._notebook = in_notebook()
        # A cell keeps every line that was written over; an output that is replaced leaves one.
        self._replaces = self._notebook and stream is None
        self._output: Any = None
        self._rewrites = self._notebook or self._stream.isatty()
        self._last, self._written = self.begun if quiet else -float("inf"), False
        _progress_state.lines.append(self)

    def step(self, done: int | None = None, note: str = "", left: float | None = None) -> None:
        """Count one step, or up to `done`, and write; `left` are seconds, where the count does not tell."""
        self.done = self.done + 1 if done is None else done
        self.note, self.left = note, left
        root = _progress_state.lines[0] if self in _progress_state.lines else self
        if not self.quiet or not any(not line.quiet for line in _progress_state.lines):
            # Rounds alone are told of once a second where lines pile up, and a terminal a few times.
            wait = REFRESH if self._rewrites else 1.0 if self.quiet else 0.0
            root._write(0.0 if self.done == self.total else wait)

    def close(self) -> None:
        """End the line, and those inside it that a protocol which failed left open."""
        if self in _progress_state.lines:
            del _progress_state.lines[_progress_state.lines.index(self) :]
        if self._written and self._rewrites and not self._replaces:
            self._print("", "\n")
            self._written = False

    def _write(self, wait: float) -> None:
        now = self._clock()
        left, at_most = self._seconds_left(now)
        if not self._is_wanted(now - self.begun, None if at_most else left):
            return
        if now - self._last < wait:
            return
        text = self._text(now - self.begun, left, "at most" if at_most else "about")
        self._last, self._written = now, True
        if self._replaces:
            self._replace(text)
            return
        end, cut = ("", f"\r{text[:WIDTH]:<{WIDTH}}") if self._rewrites else ("\n", text)
        self._print(cut, end)

    def _print(self, text: str, end: str) -> None:
        """Write; a stream that is closed or full ends no computation."""
        with suppress(OSError, ValueError):
            print(text, end=end, file=self._stream, flush=True)

    def _replace(self, text: str) -> None:
        """Show the line in the place of the one before, as one output of the notebook's cell."""
        shown = {"text/plain": text}
        if self._output is None:
            display: Any = sys.modules["IPython"].display
            self._output = display.display(shown, raw=True, display_id=True)
        else:
            self._output.update(shown, raw=True)

    def _is_wanted(self, seconds: float, left: float | None) -> bool:
        if _progress_state.wanted is not None:
            return _progress_state.wanted
        default = os.environ.get("FEDSTAT_PROGRESS", "")
        if default in ("0", "1"):
            return default == "1"
        return self._notebook and (seconds >= LONG or (seconds >= 1.0 and seconds + (left or 0.0) >= LONG))

    def _text(self, seconds: float, left: float | None, about: str) -> str:
        lines = _progress_state.lines or [self]
        counts = [line for line in lines if not line.quiet]
        parts = [", ".join(line.count for line in counts)] if counts else []
        parts += [line.count for line in lines if line.quiet]
        parts.append(duration(seconds))
        if left:
            parts.append(f"{about} {duration(left)} left")
        return "  ".join([*parts, *(line.note for line in counts if line.note)])

    @property
    def count(self) -> str:
        """What is done, of how much."""
        of = "of at most" if self.at_most else "of"
        return f"{self.what} {self.done:,}" + (f" {of} {self.total:,}" if self.total else "")

    def _seconds_left(self, now: float) -> tuple[float | None, bool]:
        """Seconds until the outermost count that tells is through, at its rate so far; whether at most."""
        for line in _progress_state.lines or [self]:
            if line.left is not None:
                return line.left, False
            if line.total and line.done:
                return (now - line.begun) / line.done * (line.total - line.done), line.at_most
        return None, False


@contextmanager
def open_line(what: str, total: int | None = None, *, at_most: bool = False) -> Iterator[ProgressLine]:
    """Open a line, and close it whatever happens."""
    line = ProgressLine(what, total)
    line.at_most = at_most
    try:
        yield line
    finally:
        line.close()


def expect_rounds(most: int) -> None:
    """Tell the rounds of the innermost run that at most so many are to come."""
    for line in reversed(_progress_state.lines):
        if line.quiet:
            line.total, line.at_most = line.done + most, True
            return


def counted(steps: Sequence[T], what: str) -> Iterator[T]:
    """Yield some steps, and tell of each when it is done."""
    with open_line(what, len(steps)) as line:
        for one in steps:
            yield one
            line.step()


def duration(seconds: float) -> str:
    """Write a time in the unit in which it is read."""
    if seconds < 100.0:
        return f"{seconds:.0f} s" if seconds >= 10.0 else f"{seconds:.1f} s"
    return f"{seconds / 60.0:.0f} min" if seconds < 6000.0 else f"{seconds / 3600.0:.1f} h"
