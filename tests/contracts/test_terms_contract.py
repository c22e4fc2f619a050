"""Every released sum has terms that the release history compares, or a stated reason why not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from contracts.terms import FURTHER_WEIGHTS, NOISE_FACTS, TERM_FACTS, WITHOUT_TERMS, reason_of

from fedstat.federation.disclosure.site import FAMILIES, load_families
from fedstat.federation.message import COUNTED, ArrayDeclaration, Step

load_families()


def released(kinds: tuple[str, ...]) -> Iterator[tuple[str, str, str, ArrayDeclaration]]:
    for family, steps in FAMILIES.items():
        for name, step in steps.items():
            if not getattr(step.run, "__module__", "").startswith(("fedstat.", "functools")):
                continue  # a family of another test
            for array, declared in step.given.items():
                if declared.kind in kinds:
                    yield family, name, array, declared


def lacks_terms(declared: ArrayDeclaration) -> bool:
    return not set(declared.behind) & {*TERM_FACTS, *NOISE_FACTS}


def test_a_sum_has_terms_or_a_reason():
    lacking = {(family, step) for family, step, _, one in released(COUNTED) if lacks_terms(one)}
    unnamed = {one for one in lacking if not reason_of(*one)}
    assert not unnamed, "report a fact of contracts/terms.py, or state the reason there"
    families = {family for family, _ in lacking}
    for family, step in WITHOUT_TERMS:
        assert ((family, step) in lacking) if step != "*" else (family in families), (
            "the reason is not needed"
        )


@pytest.mark.parametrize(("family", "step"), FURTHER_WEIGHTS)
def test_a_step_with_further_weights_exists_and_has_terms(family, step):
    found: Step = FAMILIES[family][step]
    assert not any(lacks_terms(one) for one in found.given.values() if one.kind in COUNTED)
