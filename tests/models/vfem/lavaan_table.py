"""The data that lavaan was run on: ``python tests/models/vfem/lavaan_table.py table.csv``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # as pytest does it
from moments_cases import four_clients


def study():
    """Correlated blocks, some of them skewed; missing records depend on the response."""
    return four_clients(seed=3, between=0.5)


if __name__ == "__main__":
    study().table.to_csv(sys.argv[1], index=False, float_format="%.17g")
