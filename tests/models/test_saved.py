"""Files that other versions wrote are refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedstat as fs
from fedstat.errors import ModelError
from fedstat.federation.message import pack

FORMER = Path(__file__).parents[1] / "reference" / "saved" / "glm_2.fed"
"""Written by the former version, see make.py beside it."""


def test_a_file_of_the_former_version_is_refused_with_a_remedy():
    with pytest.raises(
        ModelError,
        match=r"glm_2\.fed: saved by an earlier fedstat 0\.1\.0 .*'fedstat glm results 2'.*Fit the model",
    ):
        fs.load(FORMER)


@pytest.mark.parametrize(
    "form", ["glm results 1", "vertical glm results 1", "vfem results 1", "vfem glm results 1"]
)
def test_so_are_files_of_other_families(form, tmp_path):
    path = tmp_path / "old.fed"
    path.write_bytes(pack({"format": f"fedstat {form}", "content": "{}"}, {"x": np.ones(2)}))
    told = rf"old\.fed: saved by an earlier fedstat .*'fedstat {form}'.*tidy\(\)"
    with pytest.raises(ModelError, match=told):
        fs.load(path)
