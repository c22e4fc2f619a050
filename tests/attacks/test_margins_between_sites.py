"""Sites with different columns: no small cell and no value follows from all tables of a study together.

The attacker has every cross table of two columns, every table one by every group, and every correlation, and
solves for what these do not show: the cells of three columns, and the numbers of single entities.
"""

from itertools import combinations, product

import numpy as np
import pandas as pd
import pytest
from released import miss
from scipy.optimize import linprog

import fedstat as fs
from fedstat.errors import DesignError, PolicyError

pytestmark = pytest.mark.filterwarnings("ignore")

N, VICTIM = 150, 17
CATEGORIES = {"arm": "abc", "sex": "fm", "smoker": "ny", "stage": "rst"}
NUMBERS = ("bmi", "age")
SITES = {"Clinic": ["arm", "sex"], "Lab": ["bmi", "smoker"], "Survey": ["age", "stage"]}
REFUSED = (PolicyError, DesignError)


def people(seed):
    """Make people with rare combinations, some of whom a site lacks."""
    rng = np.random.default_rng(seed)
    table = pd.DataFrame({"id": np.arange(N)})
    for name, levels in CATEGORIES.items():
        table[name] = rng.choice(list(levels), N, p=rng.dirichlet(np.full(len(levels), 4.0)))
    for name in NUMBERS:
        table[name] = rng.normal(50.0, 9.0, N).round(2)
    for columns in SITES.values():
        table.loc[rng.choice(N, 12, replace=False), columns] = None
    return table.astype(dict.fromkeys(NUMBERS, float))


def partition(table, policy="strict", sites=None):
    frames = {
        site: table[["id", *columns]].dropna(how="all", subset=columns)
        for site, columns in (sites or SITES).items()
    }
    published = {
        site: {
            name: {"kind": "number", "range": [0.0, 110.0]}
            if pd.api.types.is_numeric_dtype(frame[name])
            else {"kind": "category", "levels": sorted(frame[name].dropna().unique())}
            for name in frame.columns[1:]
        }
        for site, frame in frames.items()
    }
    return fs.ClientPartition.from_frames(frames, on="id", policy=policy, published=published)


def ends(inside, equations, known):
    """Return the least and the largest count of some cells that agree with all published counts."""
    A, b = np.array(equations, dtype=float), np.array(known, dtype=float)
    return [sign * linprog(sign * inside, A_eq=A, b_eq=b, method="highs").fun for sign in (1.0, -1.0)]


def everything(at):
    """Request all tables of a study: pairs of columns that were counted or correlated, groups of numbers."""
    tables = {"counts": {}, "groups": [], "pairs": []}
    for pair in combinations(CATEGORIES, 2):
        try:
            tables["counts"][pair] = fs.crosstab(at, *pair)
        except REFUSED:
            continue
    for name, by in product([*NUMBERS, *CATEGORIES], CATEGORIES):
        try:
            (found,) = fs.table_one(at, name if name in NUMBERS else f"C({name})", by=by).variables
        except (*REFUSED, fs.errors.ModelError):
            continue
        if name in NUMBERS:
            tables["groups"].append((name, by))
        else:
            tables["counts"][name, by] = pd.DataFrame(found.counts.T, found.levels, sorted(CATEGORIES[by]))
    try:
        fs.corr(at, list(NUMBERS))
        tables["pairs"].append(NUMBERS)
    except REFUSED:
        pass
    return tables


def in_span(equations):
    """Return the unknowns that linear equations (rows of a matrix) determine."""
    A = np.array(equations, dtype=float)
    _, size, right = np.linalg.svd(A)
    rank = int((size > 1e-9 * size[0]).sum())
    return np.abs(right[rank:]).max(axis=0, initial=0.0) < 1e-9


@pytest.mark.parametrize("policy", [None, "strict"])
@pytest.mark.parametrize("seed", range(2))
def test_no_small_cell_of_three_columns_follows_from_all_tables_of_two(seed, policy):
    table = people(seed)
    tables = everything(partition(table, policy))
    assert len(tables["counts"]) >= (2 if policy else 8)
    # Unknown are the cells of all four columns; a column that a site lacks is a level of its own.
    levels = [[*values, None] for values in CATEGORIES.values()]
    cells = list(product(*levels))
    names = list(CATEGORIES)
    equations, known = [[True] * len(cells)], [N]
    for (a, b), counts in tables["counts"].items():
        i, j = names.index(a), names.index(b)
        for x, y in product(CATEGORIES[a], CATEGORIES[b]):
            if x in counts.index and y in counts.columns:
                equations.append([cell[i] == x and cell[j] == y for cell in cells])
                known.append(float(counts.loc[x, y]))
                assert known[-1] == 0 or known[-1] >= 3
    # The solver also uses that counts are not negative: the range of each small count of three columns.
    found = table.groupby(names, dropna=False).size()
    small = 0
    for three in combinations(range(4), 3):
        for key in product(*(levels[k][:-1] for k in three)):
            inside = np.array([all(cell[k] == x for k, x in zip(three, key, strict=True)) for cell in cells])
            where = table[[names[k] for k in three]].eq(list(key)).all(axis=1)
            if not 0 < where.sum() < 3:
                continue
            small += 1
            least, most = ends(inside, equations, known)
            assert most - least > 0.99, (key, least, most)
    assert small and found.sum() == N


def test_between_three_sites_tables_of_two_columns_can_reveal_a_count_of_three():
    """A stated limit: where no entity has some combinations, the tables leave one value for another count."""
    counts = {"fna": 0, "fnb": 15, "fya": 16, "fyb": 14, "mna": 0, "mnb": 13, "mya": 12, "myb": 1}
    rows = [key for key, count in counts.items() for _ in range(count)]
    table = pd.DataFrame([list(row) for row in rows], columns=["sex", "smoker", "arm"])
    table.insert(0, "id", range(len(table)))
    at = partition(table, "strict", {"Clinic": ["sex"], "Lab": ["smoker"], "Survey": ["arm"]})
    cells, equations, known = list(counts), [], []
    for a, b in combinations(range(3), 2):
        found = fs.crosstab(at, table.columns[a + 1], table.columns[b + 1])
        for x, y in product(found.index, found.columns):
            equations.append([cell[a] == x and cell[b] == y for cell in cells])
            known.append(found.loc[x, y])
    inside = np.array([cell == "myb" for cell in cells])
    assert ends(inside, equations, known) == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("policy", [None, "strict"])
@pytest.mark.parametrize("seed", range(2))
def test_no_number_of_one_entity_follows_from_all_sums(seed, policy):
    table = people(seed)
    tables = everything(partition(table, policy))
    assert len(tables["groups"]) >= (0 if policy else 6)
    for name in NUMBERS:
        other = next(one for one in NUMBERS if one != name)
        sums = [table[name].notna()]
        for _, by in (one for one in tables["groups"] if one[0] == name):
            sums += [table[name].notna() & (table[by] == level) for level in CATEGORIES[by]]
        # The correlation is a sum with the other column as coefficients, which an ally may know.
        sums += [table[other].where(table[name].notna(), 0.0).fillna(0.0)] if tables["pairs"] else []
        assert not in_span([np.asarray(one, dtype=float) for one in sums]).any()


def moved(table, column):
    """Change the level of one entity."""
    levels = list(CATEGORIES[column])
    changed = table[column].copy()
    changed[VICTIM] = levels[levels.index(changed[VICTIM]) - 1]
    return changed


def complete(seed=1):
    """Make people whom all sites have."""
    table = people(seed)
    for name in table.columns[table.isna().any()]:
        table[name] = table[name].fillna(table[name].mode()[0])
    return table


@pytest.mark.parametrize("kind", ["level", "missing", "merged"])
def test_repeated_tables_with_a_column_that_differs_in_one_entity(kind):
    """A second column of the site has another level, or no value, for one entity, or joins a rare level."""
    table = complete()
    if kind == "level":
        table["other"] = moved(table, "arm")
    elif kind == "missing":
        table["other"] = table["arm"].where(table["id"] != VICTIM)
    else:
        table["arm"] = np.where(table["id"] == VICTIM, "c", np.where(table["arm"] == "c", "a", table["arm"]))
        table["other"] = table["arm"].replace("c", "a")
    sites = {**SITES, "Clinic": ["arm", "other"]}
    for call in (
        lambda at, column: fs.crosstab(at, "smoker", column).to_numpy(),
        lambda at, column: fs.table_one(at, "bmi", by=column).variables[0].rows,
    ):
        at = partition(table, "strict", sites)
        with pytest.raises(REFUSED):
            for column in ("arm", "other"):
                call(at, column)
    if kind != "merged":
        # Without rules the two tables differ in the level of this entity at the other site.
        at = partition(table, "open", sites)
        first, second = (fs.crosstab(at, "smoker", column).to_numpy() for column in ("arm", "other"))
        (level,) = np.flatnonzero((first != second).any(axis=1))
        assert sorted(CATEGORIES["smoker"])[level] == table["smoker"][VICTIM]


def test_between_three_sites_similar_columns_of_two_reveal_one_entity():
    """A stated limit: two sites have nearly the same column, and no site can compare the two."""
    table = complete()
    table["arm2"] = moved(table, "arm")
    sites = {"Clinic": ["arm"], "Lab": ["bmi", "smoker"], "Survey": ["arm2", "age"]}
    at = partition(table, "strict", sites)
    sums = []
    for by in ("arm", "arm2"):
        (found,) = fs.table_one(at, "bmi", by=by).variables
        sums.append(found.rows * found.mean)
    value = np.abs(sums[0] - sums[1]).max()
    assert miss(value, table["bmi"][VICTIM], table["bmi"]) < 0.2
    with pytest.raises(REFUSED):
        fs.crosstab(at, "arm", "arm2")
