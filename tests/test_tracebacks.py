"""Errors at a prompt and in a notebook: the user's line and the message, without frames of the package."""

import os
import subprocess
import sys

import pytest

FIT = """
import fedstat as fs
partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
fs.FederatedGLM.from_formula("num ~ age + I(2 * age)", partition).fit()
"""


def printed(script, keep=""):
    environment = {name: value for name, value in os.environ.items() if name != "FEDSTAT_TRACEBACK"}
    if keep:
        environment["FEDSTAT_TRACEBACK"] = keep
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300
    )
    return run.stdout + run.stderr


def test_a_script_shows_its_own_line_and_the_message():
    text = printed(FIT)
    assert "design columns are collinear" in text.splitlines()[-1]
    assert 'File "<string>", line 4' in text
    assert text.count("  File ") == 2  # this line, and the public call
    assert "During handling" not in text


def test_work_on_the_package_can_see_every_frame():
    text = printed(FIT, "full")
    assert "design columns are collinear" in text.splitlines()[-1]
    assert text.count("  File ") > 8


def test_a_notebook_shows_the_same():
    pytest.importorskip("IPython")
    script = (
        f"from IPython.core.interactiveshell import InteractiveShell\nInteractiveShell().run_cell({FIT!r})"
    )
    text = printed(script)
    assert "design columns are collinear" in text
    assert "checks.py" in text and "engine.py" not in text and "protocol.py" not in text


def test_bugs_keep_all_their_frames():
    broken = FIT.replace("partition).fit()", "partition)\n").replace(
        "fs.FederatedGLM", "model = fs.FederatedGLM"
    )
    text = printed(broken + "model.engine = None\nmodel.fit()")
    assert "AttributeError" in text and "run.py" in text
