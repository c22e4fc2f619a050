"""Wall and CPU seconds and peak memory of named stages, and tasks in processes of their own."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time


class Clock:
    """Wall and CPU seconds, and the peak of resident memory, of named stages."""

    def __init__(self):
        self.stages = {}

    def time(self, stage, call, *arguments, **options):
        wall, cpu = time.perf_counter(), time.process_time()
        value = call(*arguments, **options)
        row = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        self.stages.setdefault(stage, []).append(row | {"peak": peak()})
        return value


def peak():
    """Largest resident memory of this process so far, MB."""
    # Kilobytes on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def in_a_process(script, task, *arguments, python=sys.executable):
    """Run one task of a script in a process of its own; it prints a line of JSON last."""
    command = [python, str(script), "task", task, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{task} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
