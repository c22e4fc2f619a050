"""Progress of long computations: what is shown, when, and where."""

import inspect
import io
import sys
from types import SimpleNamespace

import pytest
from numba import njit
from statsmodels.genmod.families import Binomial

import fedstat as fs
from fedstat import progress_line
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.message import Request
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.progress_line import ProgressLine, counted, duration, report_compiling, shows_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv("FEDSTAT_PROGRESS", raising=False)
    yield
    assert not progress_line._progress_state.lines


def run(stream, seconds, steps=4, note=""):
    """Count steps of some seconds each."""
    clock = Clock()
    line = ProgressLine("fold", steps, stream=stream, clock=clock)
    for _ in range(steps):
        clock.now += seconds
        line.step(note=note)
    line.close()
    return stream.getvalue()


def test_a_file_has_a_line_a_step_with_the_time_left():
    with fs.progress():
        reported = run(io.StringIO(), 30.0, note="loss 0.1")
    assert reported.splitlines() == [
        "fold 1 of 4  30 s  about 90 s left  loss 0.1",
        "fold 2 of 4  60 s  about 60 s left  loss 0.1",
        "fold 3 of 4  90 s  about 30 s left  loss 0.1",
        "fold 4 of 4  2 min  loss 0.1",
    ]


def test_a_terminal_has_one_line_that_is_written_over_not_too_often():
    with fs.progress(True):
        slow, fast = run(Terminal(), 30.0), run(Terminal(), 0.04, 10)
    assert slow.count("\r") == 4 and slow.count("\n") == 1 and slow.endswith("\n")
    assert all(len(part) == progress_line.WIDTH for part in slow.strip("\n").split("\r")[1:])
    # At .04, .16, .28 and .4 seconds, of ten steps.
    assert fast.count("\r") == 4 and "fold 10 of 10" in fast


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_nothing_is_reported_unless_it_was_requested(stream):
    assert run(stream, 1000.0) == ""


def test_a_notebook_is_reported_of_what_takes_five_seconds(monkeypatch):
    monkeypatch.setattr(progress_line, "in_notebook", lambda: True)
    assert run(io.StringIO(), 1.2) == ""
    reported = run(io.StringIO(), 2.0)
    assert (
        reported.startswith("\rfold 1 of 4") and "about 6.0 s left" in reported and reported.count("\n") == 1
    )
    # A computation that is not known to be long is shown once it has been.
    clock, stream = Clock(), io.StringIO()
    line = ProgressLine("round", quiet=True, stream=stream, clock=clock)
    for clock.now in (2.0, 4.0, 6.0):
        line.step()
    line.close()
    assert stream.getvalue().split() == ["round", "3", "6.0", "s"]
    with fs.progress(False):
        assert run(io.StringIO(), 100.0) == ""
    monkeypatch.setenv("FEDSTAT_PROGRESS", "0")
    assert run(io.StringIO(), 100.0) == ""


def test_a_notebook_has_one_output_that_is_replaced(monkeypatch, capsys):
    shown = []

    class Output:
        def update(self, data, *, raw):
            shown[-1].append(data["text/plain"])

    def display(data, *, raw, display_id):
        shown.append([data["text/plain"]])
        return Output()

    monkeypatch.setattr(progress_line, "in_notebook", lambda: True)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=SimpleNamespace(display=display)))
    clock = Clock()
    outer, inner = ProgressLine("fold", 4, clock=clock), ProgressLine("half", 2, clock=clock)
    clock.now = 2.0
    outer.step(note="loss 0.1")
    clock.now = 4.0
    inner.step()
    inner.close()
    clock.now = 6.0
    outer.step(4)
    outer.close()
    first = "fold 1 of 4, half 0 of 2  2.0 s  about 6.0 s left  loss 0.1"
    second = "fold 1 of 4, half 1 of 2  4.0 s  about 12 s left  loss 0.1"
    assert shown == [[first, second, "fold 4 of 4  6.0 s"]]
    assert capsys.readouterr() == ("", "")


def test_rounds_have_a_bound_where_one_is_known():
    clock, stream = Clock(), io.StringIO()
    with fs.progress():
        line = ProgressLine("round", quiet=True, stream=stream, clock=clock)
        line.step()
        progress_line.expect_rounds(9)
        clock.now = 2.0
        line.step()
        line.close()
    assert stream.getvalue() == "round 2 of at most 10  2.0 s  at most 8.0 s left\n"


def test_the_kernel_of_a_notebook_is_known(monkeypatch):
    class ZMQInteractiveShell:
        pass

    class IPython:
        get_ipython = staticmethod(ZMQInteractiveShell)

    assert not progress_line.in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", IPython)
    assert progress_line.in_notebook()


def test_the_environment_is_the_default_of_a_process(monkeypatch):
    monkeypatch.setenv("FEDSTAT_PROGRESS", "1")
    assert "fold 4 of 4" in run(io.StringIO(), 0.1)
    with fs.progress(False):
        assert run(io.StringIO(), 0.1) == ""
        with fs.progress(None):
            assert run(io.StringIO(), 0.1) == ""


def test_counts_inside_counts_share_a_line_with_the_rounds_and_the_outer_time():
    clock, stream = Clock(), io.StringIO()
    with fs.progress():
        outer = ProgressLine("size", 3, stream=stream, clock=clock)
        rounds = ProgressLine("round", quiet=True, stream=stream, clock=clock)
        inner = ProgressLine("fold", 2, stream=stream, clock=clock)
        clock.now = 8.0
        rounds.step()
        assert stream.getvalue() == ""
        inner.step()
        outer.step()
        for line in (inner, rounds, outer):
            line.close()
    first, last = stream.getvalue().splitlines()
    assert first == "size 0 of 3, fold 1 of 2  round 1  8.0 s  about 8.0 s left"
    assert last == "size 1 of 3, fold 1 of 2  round 1  8.0 s  about 16 s left"


def test_a_line_says_that_loops_are_compiled():
    clock, stream = Clock(), io.StringIO()
    with fs.progress():
        rounds = ProgressLine("round", quiet=True, stream=stream, clock=clock)
        report_compiling()  # after no time
        clock.now = 4.0
        njit(lambda x: x + 1.0)(1.0)
        clock.now = 5.0
        rounds.step()
        rounds.close()
    assert stream.getvalue().splitlines() == ["round 0  4.0 s  compiling (once)", "round 1  5.0 s"]


def test_a_line_ends_where_what_it_counts_fails(capsys):
    with fs.progress(), pytest.raises(ZeroDivisionError):
        for number in counted(range(3), "draw"):
            1 / (1 - number)
    assert capsys.readouterr().err.startswith("draw 1 of 3")


@shows_progress
def sums(n, *, progress=None):
    return sum(counted(range(n), "term"))


def test_the_argument_of_a_function_holds_for_what_it_calls(capsys):
    assert sums(3, progress=True) == 3
    assert len(capsys.readouterr().err.splitlines()) == 3
    assert sums(3) == sums(3, progress=False) == 3
    assert capsys.readouterr() == ("", "")


def test_a_fit_reveals_of_its_halves_and_is_silent_by_default(capsys):
    table = fs.datasets.make_hospitals()[["age", "sex", "chol"]].dropna()
    partition = fs.ClientPartition.from_frame(table, columns={"A": ["age", "sex"], "B": ["chol"]})
    model = fs.VerticalGLM.from_formula("chol ~ age + sex", partition)
    model.fit(draws=3, folds=6, seed=1)
    assert capsys.readouterr().err == ""
    model.explain(draws=3, folds=6, progress=True)
    assert capsys.readouterr().err == ""
    model.fit(draws=3, folds=6, seed=1, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "pair of halves 3 of 3" in err and "left" in err


@pytest.mark.filterwarnings("ignore::fedstat.errors.ConvergenceWarning")
def test_every_long_computation_has_the_argument(capsys):
    hospitals = fs.datasets.make_hospitals()
    rows = fs.ClientPartition.from_frame(hospitals, by="hospital")
    fs.FedAvgM.from_formula("num > 0 ~ age", rows).fit(rounds=2, seed=1, progress=True)
    assert "averaging round 2 of 2" in capsys.readouterr().err
    fs.FedAvg.from_formula("num > 0 ~ age", rows).explain(rounds=2, progress=True)
    assert capsys.readouterr().err == ""
    fs.FedFunctionBoost.from_formula("num ~ age", rows).fit(steps=5, select="cv", folds=5, progress=True)
    assert "fold 5 of 5" in capsys.readouterr().err
    for method in (fs.FedAvg, fs.FederatedGLM, fs.FederatedOLS, fs.CopulaSynthesizer, fs.PrivateCopulaGLM):
        assert "progress" in inspect.signature(method.fit).parameters
    assert "progress" in inspect.signature(fs.rehearse).parameters


def test_a_path_and_its_folds_are_counted(capsys):
    table = (
        fs.datasets.make_hospitals()[["age", "sex", "chol", "num"]]
        .dropna()
        .assign(ill=lambda t: (t["num"] > 0).astype(float))
    )
    partition = fs.ClientPartition.from_frame(table, columns={"A": ["age", "ill"], "B": ["chol", "sex"]})
    model = fs.VerticalGLM.from_formula("ill ~ age + chol + sex", partition, family=Binomial())
    model.fit(select="cv", folds=4, n_lambdas=10, progress=True, seed=1)
    reported = capsys.readouterr().err
    assert (
        "proposal 1 of at most 12" in reported
        and "model of fold 4 of 4" in reported
        and "fold 4 of 4  " in reported
    )
    model.fit(path="exact", n_lambdas=4, progress=True)
    assert "lambda 4 of 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    "seconds, text", [(0.04, "0.0 s"), (9.96, "10.0 s"), (99.0, "99 s"), (150.0, "2 min"), (7200.0, "2.0 h")]
)
def test_times_are_written_in_the_unit_in_which_they_are_read(seconds, text):
    assert duration(seconds) == text


def test_a_failed_run_whose_traceback_is_kept_leaves_no_line_open():
    def protocol():
        for _ in counted([1, 2], "fold"):
            yield [Request("nobody", "schema", "schema")]

    with pytest.raises(fs.errors.MessageError) as kept:
        LocalEngine({}).run(protocol(), Ledger())
    assert kept.value.__traceback__ is not None and not progress_line._progress_state.lines


def test_a_stream_that_was_closed_ends_no_computation():
    stream = Terminal()
    with fs.progress():
        line = ProgressLine("fold", 2, stream=stream)
        line.step()
        stream.close()
        line.step()
        line.close()
    assert not progress_line._progress_state.lines
