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
"""Least duration in seconds of a computation that a notebook reports without a request."""
REFRESH = 0.1
LONG_COMPILATION = 3.0
"""Seconds between two lines about it where lines accumulate."""
WIDTH = 100


class _ProgressState(threading.local):
    """Request of this thread, and the open lines, the outermost first."""

    def __init__(self) -> None:
        self.wanted: bool | None = None
        self.lines: list[ProgressLine] = []


_progress_state = _ProgressState()


@contextmanager
def progress(wanted: bool | None = True) -> Iterator[None]:
    """Report the progress of everything inside on one line of the standard error.

    Every fit, search, bootstrap and alignment reports its rounds and, once known, the time left. The argument
    ``progress=`` of a fit does the same for that fit. In a notebook it is the default for computations of
    more than five seconds, in one output of the cell; elsewhere nothing is written unless requested. If the
    standard error is not a terminal, a line is written for every step. The environment variable
    ``FEDSTAT_PROGRESS`` (0 or 1) sets the default of a process.

    Parameters
    ----------
    wanted : bool, optional
        False for silence, None for the outer setting.

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
    """Apply the argument `progress` of a function to everything that it calls."""

    @wraps(call)
    def reported(*args: P.args, **kwargs: P.kwargs) -> T:
        wanted = kwargs.get("progress")
        with progress(wanted if isinstance(wanted, bool) else None):
            return call(*args, **kwargs)

    return reported


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


class ProgressLine:
    """A count of steps, `total` of them if that is known; nested lines share one line of text.

    A line of rounds (`quiet`) is shown with the others, and alone if there are none.
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
        self.at_most = False  # whether the total is only an upper bound
        self.done, self.note, self.compiling = 0, "", False
        self.left: float | None = None
        self._stream = sys.stderr if stream is None else stream
        self._clock, self.begun = clock, clock()
        self._notebook = in_notebook()
        # A cell keeps every overwritten line; a replaced output leaves one line only.
        self._replaces = self._notebook and stream is None
        self._output: Any = None
        self._rewrites = self._notebook or self._stream.isatty()
        self._last, self._written = self.begun if quiet else -float("inf"), False
        _progress_state.lines.append(self)

    def step(self, done: int | None = None, note: str = "", left: float | None = None) -> None:
        """Count one step, or up to `done`, and write; `left` are seconds, if the count does not give them."""
        self.done = self.done + 1 if done is None else done
        self.note, self.left = note, left
        for line in _progress_state.lines:
            line.compiling = False
        root = _progress_state.lines[0] if self in _progress_state.lines else self
        if not self.quiet or not any(not line.quiet for line in _progress_state.lines):
            # Rounds alone are written once a second if lines accumulate, and more often on a terminal.
            wait = REFRESH if self._rewrites else 1.0 if self.quiet else 0.0
            root._write(0.0 if self.done == self.total else wait)

    def close(self) -> None:
        """End the line, and nested lines that a failed protocol left open."""
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
        """Write; an error of a closed or full stream does not end the computation."""
        with suppress(OSError, ValueError):
            print(text, end=end, file=self._stream, flush=True)

    def _replace(self, text: str) -> None:
        """Replace the previous line, as one output of the notebook's cell."""
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
        parts += ["compiling (once)"] if any(line.compiling for line in lines) else []
        return "  ".join([*parts, *(line.note for line in counts if line.note)])

    @property
    def count(self) -> str:
        """Number of finished steps, and their total."""
        of = "of at most" if self.at_most else "of"
        return f"{self.what} {self.done:,}" + (f" {of} {self.total:,}" if self.total else "")

    def _seconds_left(self, now: float) -> tuple[float | None, bool]:
        """Seconds until the outermost count with a total ends, at its present rate; and whether at most."""
        for line in _progress_state.lines or [self]:
            if line.left is not None:
                return line.left, False
            if line.total and line.done:
                return (now - line.begun) / line.done * (line.total - line.done), line.at_most
        return None, False


@contextmanager
def open_line(what: str, total: int | None = None, *, at_most: bool = False) -> Iterator[ProgressLine]:
    """Open a line, and close it in any case."""
    line = ProgressLine(what, total)
    line.at_most = at_most
    try:
        yield line
    finally:
        line.close()


def report_compiling() -> None:
    """Write that the time is that of compiled loops, which later fits load from a cache."""
    if _progress_state.lines:
        _progress_state.lines[-1].compiling = True
        root = _progress_state.lines[0]
        root._write(REFRESH if root._rewrites else LONG_COMPILATION)


def expect_rounds(most: int) -> None:
    """Set the largest number of remaining rounds of the innermost run."""
    for line in reversed(_progress_state.lines):
        if line.quiet:
            line.total, line.at_most = line.done + most, True
            return


def counted(steps: Sequence[T], what: str) -> Iterator[T]:
    """Yield some steps, and report each when it is done."""
    with open_line(what, len(steps)) as line:
        for one in steps:
            yield one
            line.step()


def duration(seconds: float) -> str:
    """Write a duration in a suitable unit."""
    if seconds < 100.0:
        return f"{seconds:.0f} s" if seconds >= 10.0 else f"{seconds:.1f} s"
    return f"{seconds / 60.0:.0f} min" if seconds < 6000.0 else f"{seconds / 3600.0:.1f} h"
