"""Fixtures of the contracts, and the option that writes the golden files again."""

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--write-golden",
        action="store_true",
        help="write the golden files of tests/contracts again instead of comparing with them",
    )


@pytest.fixture
def writes_golden(request):
    """Whether the golden files are written again."""
    return request.config.getoption("--write-golden", default=False)
