"""The public names, spelled out, to which a new family adds its own: a change here changes the interface."""

import inspect
import subprocess
import sys
import types
from importlib.metadata import version
from itertools import pairwise

import pytest
from public_api import entries, function_of, members

import fedstat
import fedstat.datasets
import fedstat.errors
from fedstat.docstrings import REFERENCE
from fedstat.models import INSTALLED

PUBLIC = [
    "Budget",
    "ClientPartition",
    "Curve",
    "FedAvg",
    "FedAvgM",
    "FedProx",
    "FederatedGLM",
    "GLORE",
    "LongCurve",
    "Policy",
    "QFedAvg",
    "VFEMRegression",
    "VerticalGLM",
    "__version__",
    "audit",
    "combine",
    "compare",
    "curves",
    "datasets",
    "errors",
    "load",
    "meta",
    "pool",
    "progress",
    "rehearse",
    "results",
    "threats",
    "verify_receipt",
]
PUBLIC = sorted({*PUBLIC, *(name for names in INSTALLED.values() for name in names)})
DATASETS = [
    "SimulatedClusters",
    "SimulatedData",
    "SimulatedSelection",
    "SimulatedSites",
    "load_adults",
    "load_card_holders",
    "load_hospitals",
    "load_scans",
    "load_selection_published",
    "load_sme",
    "load_sme_published",
    "load_weather",
    "make_blocks",
    "make_cluster_experiment",
    "make_clusters",
    "make_hospitals",
    "make_logistic_sites",
    "make_repeated",
    "make_selection",
    "make_sme",
    "make_sme_risk",
    "make_survival",
    "write_sme_sample",
]


def documented():
    """Public callables with their names: functions, classes, and the methods of classes by who defines them.

    What a reader calls; of results and errors, which are made for him, :mod:`test_examples` asks for less.
    """
    found = {}
    for name, value in entries().items():
        if name.startswith(("results.", "errors.")):
            continue
        found[name] = value
        for attribute, owner, raw in members(value) if inspect.isclass(value) else ():
            found[f"{owner.__qualname__}.{attribute}"] = function_of(raw)
    yield from found.items()


def arguments(value):
    return [name for name in inspect.signature(value).parameters if name not in {"self", "cls"}]


def sections(value):
    lines = (inspect.getdoc(value) or "").splitlines()
    return {title for title, rule in pairwise(lines) if title and set(rule) == {"-"}}


def constructed_by(value):
    """The class whose constructor a class inherits; anything else itself."""
    return next(c for c in value.__mro__ if "__init__" in vars(c)) if inspect.isclass(value) else value


def test_public_names_are_these():
    assert sorted(fedstat.__all__) == PUBLIC
    assert sorted(fedstat.datasets.__all__) == DATASETS


@pytest.mark.parametrize("space, names", [(fedstat, PUBLIC), (fedstat.datasets, DATASETS)])
def test_public_names_exist(space, names):
    assert not [name for name in names if not hasattr(space, name)]


def test_version_is_the_installed_one():
    assert fedstat.__version__ == version("fedstat")


def test_every_error_is_part_of_the_tree():
    for name, value in vars(fedstat.errors).items():
        if (
            inspect.isclass(value)
            and value is not fedstat.errors.Remedy
            and value.__module__ == "fedstat.errors"
        ):
            assert issubclass(value, fedstat.errors.FedstatError | fedstat.errors.FedstatWarning), name
            assert name in fedstat.errors.__doc__


def test_public_modules_are_documented():
    for name in PUBLIC:
        if isinstance(value := getattr(fedstat, name), types.ModuleType):
            assert value.__doc__, name


def faults_of_docstring(value):
    lines = (inspect.getdoc(value) or "").splitlines()
    if not lines:
        yield "no docstring"
    elif not lines[0].endswith("."):
        yield "the first line is not one sentence"
    found = sections(value) | sections(constructed_by(value))
    if arguments(value) and not found & {"Parameters", "Attributes"}:
        yield "its arguments are not documented"


def test_docstrings_are_numpydoc():
    assert not [f"{name}: {fault}" for name, value in documented() for fault in faults_of_docstring(value)]


def test_help_shows_arguments_in_full():
    """Descriptions from elsewhere are filled in, by :func:`fedstat.docstrings.inherits_params`."""
    assert not [name for name, value in documented() if REFERENCE.search(inspect.getdoc(value) or "")]


def test_settings_that_are_passed_on_are_shown():
    """A model over rows takes them in its constructor, and from_formula hands them on."""
    shown = arguments(fedstat.GLORE.from_formula)
    assert shown[:3] == ["formula", "partition", "family"]
    assert shown == arguments(constructed_by(fedstat.GLORE))


def test_a_bare_import_loads_no_scientific_package():
    """The command line and sites start without models; names are imported when they are first used."""
    code = "import sys, fedstat; fedstat.__version__; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"numpy", "pandas", "scipy", "numba", "statsmodels", "formulaic"} & set(loaded.split())


def test_sites_start_without_distributions_of_scipy():
    """They would be a quarter of the time in which a site, a partition or the command line is imported."""
    code = """if True:
        import sys, fedstat, fedstat.operator.command_line
        from importlib import import_module
        from fedstat.federation.disclosure.site import FEDERATION_FAMILIES
        for name in FEDERATION_FAMILIES:
            import_module(f"fedstat.federation.{name}")
        fedstat.ClientPartition
        print(*sys.modules)
    """
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "scipy.special" in loaded.split() and "scipy.stats" not in loaded.split()
