import os
from pathlib import Path

# Before numpy is loaded: on a busy machine, threads that wait for each other over small matrices take many
# times as long as one. Processes that a test starts inherit it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import matplotlib
import pytest

matplotlib.use("Agg")


@pytest.fixture(scope="session")
def shared_data():
    """Folder of the real data sets, which are not part of the package."""
    default = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    folder = Path(os.environ.get("FEDSTAT_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip("real data are absent: set FEDSTAT_TEST_DATA to their folder")
    return folder
