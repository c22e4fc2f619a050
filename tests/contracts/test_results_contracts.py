"""Contracts on the results of all families: storage, printed form, predictions, inherited notes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import pickle
import re
from collections.abc import Mapping

import numpy as np
import pandas as pd
import polars
import pytest
from contracts.families import FAMILIES, FITS, MADE, PARTITIONS, result
from contracts.golden import text_of
from contracts.over_families import over_families
from numpy.testing import assert_allclose

import fedstat as fs
from fedstat.errors import FedstatError, ModelError, NotAvailableError
from fedstat.federation.message import pack, unpack
from fedstat.inference.estimate import LEVELS
from fedstat.inference.summary import SEVERITIES, Note, Report, critical_notes
from fedstat.models.results import CoefficientResults, Results

pytestmark = pytest.mark.filterwarnings("ignore")
BROOM = ["estimate", "std_error", "statistic", "p_value", "conf_low", "conf_high"]
OF_FAMILY = {name: [fit for fit in FITS if FITS[fit].family == name] for name in FAMILIES}
"""Names of the fits of each family."""


def results_of(family):
    """Results of all fits of a family, and those that are made of them."""
    fits = OF_FAMILY[family.name]
    return {name: result(name) for name in [*fits, *(made for made in MADE if MADE[made][0] in fits)]}


@functools.cache
def printed(name):
    """Text of a result, made once."""
    return text_of(result(name))


@over_families("saved")
def test_saved_loaded_and_pickled(family, tmp_path):
    for name, fit in results_of(family).items():
        again = pickle.loads(pickle.dumps(fit))
        assert text_of(again) == printed(name), name
        if isinstance(fit, Results):
            fit.save(tmp_path / "file")
            loaded = fs.load(tmp_path / "file")
            assert type(loaded) is type(fit) and text_of(loaded) == printed(name), name
            pd.testing.assert_frame_equal(loaded.tidy(), fit.tidy())
            for table in ("ledger", "trace"):
                there, here = getattr(loaded, table, None), getattr(fit, table, None)
                assert (there is None) == (here is None), (name, table)
                if table == "ledger" and here is not None:
                    there, here = there.to_frame(), here.to_frame()
                if here is not None:
                    pd.testing.assert_frame_equal(there, here, check_exact=True)


def without_defaults(value, plain):
    """Leave out of plain values what an earlier version did not write: fields that have their default."""
    if dataclasses.is_dataclass(value) and isinstance(plain, dict):
        kept = {}
        for name, one in plain.items():
            spec = type(value).__dataclass_fields__[name]
            if spec.default is not dataclasses.MISSING and getattr(value, name) is spec.default:
                continue
            kept[name] = without_defaults(getattr(value, name), one)
        return kept
    if isinstance(value, tuple | list) and isinstance(plain, list) and len(value) == len(plain):
        return [without_defaults(one, text) for one, text in zip(value, plain, strict=True)]
    if isinstance(value, Mapping) and isinstance(plain, dict):
        return {str(k): without_defaults(one, plain[str(k)]) for k, one in value.items() if str(k) in plain}
    return plain


@over_families("saved")
def test_a_file_of_an_earlier_version_lacks_fields_with_a_default(family, tmp_path):
    for name, fit in results_of(family).items():
        if isinstance(fit, Results):
            header, arrays = unpack(fit._packed())
            content = without_defaults(fit._saved_record(), json.loads(header["content"]))
            (tmp_path / "file").write_bytes(pack({**header, "content": json.dumps(content)}, arrays))
            assert text_of(fs.load(tmp_path / "file")) == printed(name), name


@over_families("shown")
def test_repr_tidy_glance_and_notes(family):
    for name, fit in results_of(family).items():
        if not isinstance(fit, Report):
            assert isinstance(fit, pd.DataFrame) and len(fit), name
            continue
        assert not isinstance(fit, Results) or "\n" not in repr(fit), name
        table, tidy, glance = fit.diagnostics(), fit.tidy(), fit.glance()
        assert list(table) == ["kind", "severity", "note", "values"], name
        assert table["note"].tolist() == fit.notes and table["kind"].str.fullmatch("[a-z_]+").all(), name
        ranks = [SEVERITIES.index(severity) for severity in table["severity"]]
        assert ranks == sorted(ranks), name
        assert len(tidy) and len(glance) == 1 and glance.shape[1] > 1, name
        text = fit.summary(title="Our title").as_text()
        for width in (80, 98):
            assert max(map(len, fit.summary().as_text(width).splitlines())) <= width, name
        critical = table.loc[table["severity"] == "critical", "note"].tolist()
        assert "Our title" in text and list(fit.summary().headlines) == [f"*** {n} ***" for n in critical], (
            name
        )


@over_families("columns of broom")
def test_coefficients_have_the_columns_of_broom(family):
    for name, fit in results_of(family).items():
        if isinstance(fit, CoefficientResults):
            table, with_site = fit.tidy(), any(fit.estimate.sites)
            assert list(table) == ["term", *(["site"] if with_site else []), *BROOM], name
            assert table["term"].tolist() == fit.params.index.tolist() == list(fit.estimate.names), name
            if fit.estimate.cov is not None:
                low, high = fit.conf_int().to_numpy().T
                assert_allclose(table["conf_low"], low), assert_allclose(table["conf_high"], high)
            assert {"nobs", "n_sites", "logLik", "AIC", "BIC"} <= set(fit.glance()), name


CALLS = {
    "predictions": ({}, {"at": "mean"}, {"at": "mean", "which": "linear"}, {"at": "mean", "times": [12]}),
    "comparisons": ({}, {"at": "mean"}, {"at": "mean", "times": [12]}),
    "slopes": ({}, {"at": "mean"}, {"at": "mean", "times": [12]}),
}


@over_families("effects")
def test_effects_are_returned_or_one_sentence_says_why_not(family):
    answers, stated = 0, False
    for name, fit in results_of(family).items():
        if not isinstance(fit, CoefficientResults):
            continue
        stated |= type(fit)._response is not CoefficientResults._response
        levels = getattr(getattr(getattr(fit, "basis", None), "agreement", None), "spec", None)
        factor = next(iter(levels.levels), "x") if levels else "x"
        asked = [(call, (), given) for call, all_given in CALLS.items() for given in all_given]
        for call, values, given in [*asked, ("means", (factor,), {}), ("contrasts", (factor,), {})]:
            try:
                table = getattr(fit, call)(*values, **given).tidy()
            except FedstatError as error:
                assert len(str(error)) < 400, (name, error)
                continue
            answers += 1
            assert np.isfinite(table[["estimate", "conf_low", "conf_high"]].to_numpy(dtype=float)).all(), name
    assert bool(answers) == stated


@over_families("model")
def test_the_model_of_a_result_is_the_one_that_was_fitted(family):
    for name in OF_FAMILY[family.name]:
        fit = result(name)
        if isinstance(fit, CoefficientResults) and FITS[name].arguments is not None:
            assert type(fit.model).__name__ == family.name, name
            assert fit.model.endog_names == fit.estimate.response, name
            assert type(pickle.loads(pickle.dumps(fit)).model).__name__ == "SimpleNamespace", name


@over_families("predicted")
def test_predictions_of_new_rows(family):
    fit, table = family.base(), family.table().head(6)
    if not hasattr(fit, "predict"):
        pytest.fail("no predictions: say why in the registry")
    found = fit.predict(table)
    assert len(found) and np.isfinite(np.asarray(found, dtype=float)).all()
    wide = polars.from_pandas(table)
    for same in (table[list(reversed(table.columns))], table.to_dict("list"), wide, wide.to_arrow()):
        assert_allclose(np.asarray(fit.predict(same), float), np.asarray(found, float), rtol=1e-12)
    with pytest.raises(FedstatError, match="expected a table of rows that you hold"):
        fit.predict([1.0, 2.0])
    if family.layout == "rows":
        with pytest.raises(FedstatError, match=rf"\b{family.x}\b"):
            fit.predict(table.drop(columns=family.x))
    elif not family.noisy:
        there = fit.predict(family.partition(family.table().head(60), new_data=True))
        assert np.isfinite(np.asarray(there, dtype=float)).all()
    for name in ("predict", "get_prediction"):
        call = getattr(type(fit), name, None)
        assert call is None or list(inspect.signature(call).parameters)[1] == "exog", name
    if not hasattr(fit, "get_prediction"):
        return
    try:
        frame = fit.get_prediction(table).summary_frame(alpha=0.1)
    except NotAvailableError:  # a fit without a covariance
        return
    assert list(frame)[:2] == ["mean", "mean_se"] and {"mean_ci_lower", "mean_ci_upper"} <= set(frame)
    assert len(frame) % len(table) == 0


PLANTED = Note("planted", "PLANTED", "critical")
OWN_NOTES = {
    "evaluate": "figures about predictions, which hold for any model",
    "evaluation": "figures about predictions, which hold for any model",
    "calibration": "figures about predictions, which hold for any model",
    "test_proportional_hazards": "a test of the model",
    "test_proportional_odds": "a test of the model",
    "linear": "the first fit of an iteration, with notes of its own",
    "steps": "the same fit after another number of steps, which has its own record",
    "placebo": "a fit of another outcome, for which its notes are computed",
}
"""Members that return a result which does not have the notes of its source, with the reason."""


def reports():
    """Names of the public classes with notes."""
    kinds = {name: getattr(fs.results, name) for name in fs.results.__all__}
    return {name: kind for name, kind in kinds.items() if inspect.isclass(kind) and issubclass(kind, Report)}


def members_that_return_reports(kind):
    """Public members of a class whose annotation is a class with notes."""
    names = reports()
    for member, found in inspect.getmembers(kind):
        function = getattr(found, "fget", None) or getattr(found, "func", found)
        returned = str(getattr(function, "__annotations__", {}).get("return", "")).strip("'")
        if not member.startswith("_") and returned in names:
            yield member


@over_families("inherited")
def test_a_result_that_is_made_of_another_has_its_critical_notes(family):
    sources = {MADE[made][0] for made in MADE} & set(OF_FAMILY[family.name])
    for name in sources:
        fit = result(name)
        kind = type(fit)
        notes = kind._summary_notes
        planted = type(
            kind.__name__, (kind,), {"_summary_notes": lambda self, n=notes: iter([PLANTED, *n(self)])}
        )
        made_here = [made for made, (source, _) in MADE.items() if source == name]
        copied = pickle.loads(pickle.dumps(fit)) if not made_here else fit
        copied.__class__ = planted
        try:
            for made in made_here:
                found = MADE[made][1](copied)
                member = re.search(r"fit\.(\w+)", inspect.getsource(MADE[made][1]).partition(f'"{made}"')[2])[
                    1
                ]
                if member in OWN_NOTES or not isinstance(found, Report):
                    continue
                if made == "vfem refit":  # a fit of other columns, for which its notes are computed
                    continue
                assert PLANTED in critical_notes(found), made
                assert found.summary().as_text().startswith("*** PLANTED ***"), made
        finally:
            copied.__class__ = kind


def test_every_member_that_returns_a_result_is_in_the_registry():
    """A new member is made of some fit in MADE, or has a reason in OWN_NOTES."""
    tested = {
        re.search(r"fit\.(\w+)", line)[1]
        for line in inspect.getsource(inspect.getmodule(result)).splitlines()
        if "lambda fit: fit." in line
    }
    tested |= {"random_effects_of", "split", "search"}
    for name, kind in reports().items():
        for member in members_that_return_reports(kind):
            assert member in tested | set(OWN_NOTES), (
                f"{name}.{member}: add it to MADE, or say why in OWN_NOTES"
            )


CALL = re.compile(r"\bfit\(([a-z_]+=[^().]+)\)")
"""A call of fit that a note recommends."""
ARGUMENT = re.compile(r"\b([a-z_]+)=(?:'[^']*'|\"[^\"]*\"|True|False|None|\d[\d.e-]*)")
"""An argument with a value, in a note."""


@over_families("remedies")
def test_what_a_note_recommends_can_be_executed(family):
    """Calls of fit run; arguments of other calls exist."""
    public = getattr(fs, family.name)
    calls = [getattr(public, name, None) for name in ("from_formula", "fit", "__init__")]
    results = [getattr(fs.results, name) for name in fs.results.__all__]
    calls += [call for kind in results for _, call in inspect.getmembers(kind, inspect.isfunction)]
    calls += [fs.ClientPartition.from_frame, public]
    known = {name for call in calls if call is not None for name in inspect.signature(call).parameters}
    done = set()
    for name in OF_FAMILY[family.name]:
        for note in getattr(result(name), "notes", ()):
            unknown = {match[1] for match in ARGUMENT.finditer(note)} - known
            assert not unknown, (name, note)
            for given in CALL.findall(note):
                if given in done or FITS[name].arguments is None or "..." in given:
                    continue
                done.add(given)
                fit, arguments = FITS[name], eval(f"dict({given})")
                again = fit.make(PARTITIONS[fit.data]()).fit(**{**fit.arguments, **arguments})
                assert len(again.tidy()), (name, given)


def test_results_of_several_fits_carry_their_critical_notes():
    fits = [pickle.loads(pickle.dumps(result("ols"))) for _ in range(3)]
    assert not critical_notes(fs.pool(fits))
    kind = type(fits[0])
    fits[0].__class__ = type(
        kind.__name__, (kind,), {"_summary_notes": lambda self: iter([PLANTED, *kind._summary_notes(self)])}
    )
    assert critical_notes(fs.pool(fits)) == [PLANTED]  # once, from however many sources
    text = fs.compare({"first": fits[0], "second": fits[1]}).as_text()
    assert text.startswith("*** first: PLANTED ***")


def calls_with(argument):
    """Public methods of results, and public functions, that have an argument, by name."""
    kinds = [getattr(fs.results, name) for name in fs.results.__all__]
    found = {name: getattr(fs, name) for name in fs.__all__ if inspect.isfunction(getattr(fs, name))}
    for kind in filter(inspect.isclass, kinds):
        members = inspect.getmembers(kind, inspect.isfunction)
        found |= {call.__qualname__: call for name, call in members if not name.startswith("_")}
    of_package = {name: call for name, call in found.items() if call.__module__.startswith("fedstat")}
    return {name: call for name, call in of_package.items() if argument in inspect.signature(call).parameters}


def test_levels_of_intervals_are_one_minus_alpha():
    calls = calls_with("alpha")
    assert len(calls) > 60
    for name, call in calls.items():
        for other in ("conf_level", "level"):
            with pytest.raises(ModelError, match=f"no argument '{other}'.* alpha=0.1 means 90%"):
                call(**{other: 0.9})
        with pytest.raises(ModelError, match="expected alpha between 0 and 1, received 95"):
            call(alpha=95)
        assert inspect.signature(call).parameters["alpha"].default < 0.5, name
    assert not [name for level in LEVELS for name in calls_with(level)]
