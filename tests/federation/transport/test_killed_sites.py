"""A site's process is killed in the middle of a fit, which ends among the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from serving import connected, served

import fedstat as fs
from fedstat.errors import DataWarning, EngineError
from fedstat.federation.transport.folder import FolderTransport

NAMES, LOST = ("A", "B", "C", "D", "E"), "D"


def patients():
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"x": rng.normal(size=150), "h": np.repeat(NAMES, 30)})
    return frame.assign(y=(rng.random(150) < 1 / (1 + np.exp(-frame["x"]))).astype(int))


def fitted(partition):
    return fs.GLORE.from_formula("y ~ x", partition).fit()


class Killing:
    """Carries over a folder, and kills the process of a site before, or after, its message number `turn`."""

    bundles = FolderTransport.bundles

    def __init__(self, place, turn, answered):
        self.all, self.running = place["transport"], place["running"]
        self.turn, self.answered = turn, answered
        self.short = replace(self.all, timeout=0.5)
        self.came = 0

    def send(self, site, request):
        if site != LOST:
            return self.all.send(site, request)
        self.came += 1
        if self.came < self.turn:
            return self.all.send(site, request)
        if self.came == self.turn:
            if self.answered:
                self.all.send(site, request)
            self.running[LOST].kill()
            self.running[LOST].wait()
        if self.came == self.turn and self.answered:
            raise EngineError("'D' did not answer within 0.5 s")
        return self.short.send(site, request)


@pytest.mark.parametrize("turn, answered", [(2, False), (5, True)])
def test_a_process_that_is_killed_is_left_out(tmp_path, turn, answered):
    frame = patients()
    complete = fs.ClientPartition.from_frame(frame, by="h")
    expected = fitted(fs.ClientPartition.from_frame(frame[frame.h != LOST], by="h"))
    with served(complete, tmp_path / "sites") as place:
        partition = replace(
            connected(complete, Killing(place, turn, answered), tmp_path / "journal"), quorum=4
        )
        with pytest.warns(DataWarning, match=r"'D' was lost in round \d+.*4 of 5 sites\)"):
            result = fitted(partition)
        np.testing.assert_array_equal(result.params, expected.params)
        assert [one.site for one in result.absent] == [LOST]
        keys = {name: key for name, key in partition.fingerprints.items() if name != LOST}
        assert fs.verify_receipt(result.receipt(), keys).ok
        if answered:
            return  # the late answer is there by now, and the same script once more goes on with the site
        # The same script again: the journal has the answers of the others, so that they receive no request.
        for name in set(NAMES) - {LOST}:
            place["running"][name].kill()
        silent = Killing(place, 1, False)
        silent.all = silent.short
        again = replace(connected(complete, silent, tmp_path / "journal"), quorum=4)
        with pytest.warns(DataWarning, match="'D' was lost in round"):
            np.testing.assert_array_equal(fitted(again).params, expected.params)
