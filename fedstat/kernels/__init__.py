"""Compiled loops: arrays in, arrays out."""

from typing import Any

from numba.core import event

from fedstat.progress_line import report_compiling


class _Compiling(event.Listener):
    """Says on the progress line that a loop is compiled, which happens once on a machine."""

    def on_start(self, event: Any) -> None:
        report_compiling()

    def on_end(self, event: Any) -> None:
        """Write nothing: the next step of the computation writes the line again."""


event.register("numba:compile", _Compiling())  # type: ignore[no-untyped-call]
