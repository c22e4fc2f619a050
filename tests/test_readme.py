"""README's example and commands do what they say."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import statsmodels.formula.api as smf

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def steps(command):
    return [shlex.split(step) for step in command.split(" && ")]


def assert_is_summary_of_the_example(text):
    for expected in ("NPGR", "Credit Agency", "Judicial Organ", "INVE", "CAPITAL", "lowest", "highest"):
        assert expected in text
    assert text.startswith("*** BLOCKS ASSUMED INDEPENDENT") and text.count("***") == 2


def test_first_example_prints_what_statsmodels_finds(capsys):
    found = {}
    exec(compile(blocks("python")[0], "first example in README", "exec"), found)
    text = capsys.readouterr().out
    for expected in ("Federated OLS results", "General Motors", "Heterogeneity between sites"):
        assert expected in text
    pooled = smf.ols("invest ~ value + capital", found["books"]).fit()
    np.testing.assert_allclose(found["result"].params, pooled.params, rtol=1e-9)
    np.testing.assert_allclose(found["result"].bse, pooled.bse, rtol=1e-9)
    assert found["result"].heterogeneity.to_frame().loc["capital", "p_value"] < 0.001


def test_second_example_prints_its_summary(capsys):
    (_, example) = blocks("python")
    exec(compile(example, "second example in README", "exec"), {})
    assert_is_summary_of_the_example(capsys.readouterr().out)


def test_first_command_prints_the_summary():
    install, (program, *arguments) = steps(blocks("sh")[0])
    assert install == ["pip", "install", "."]
    assert program == "python"
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert_is_summary_of_the_example(done.stdout)


def test_second_command_is_the_one_that_all_checks_run():
    install, run = steps(blocks("sh")[1])
    assert install == ["pip", "install", ".[test]"]
    assert run == ["python", "-m", "pytest"]
    commands = [line.split(" | ")[0] for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    assert "check python -m pytest" in commands


@pytest.mark.parametrize("name", re.findall(r"`([\w.]+/[\w/.]*)`", README))
def test_paths_that_it_names_exist(name):
    assert (ROOT / name).exists()
