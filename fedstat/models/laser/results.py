"""Results of a split network: record, notes, plots, and predictions with any set of sites."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import pandas as pd

from fedstat.errors import ModelError, NotAvailableError, Remedy
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.partition.partition import ClientPartition
from fedstat.inference.estimate import takes_alpha
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import CoefficientBlock, coefficient_block_sheet, header_sheet
from fedstat.inference.tables import Sheet
from fedstat.models.checks import check_integer, check_level
from fedstat.models.laser.evaluation import (
    SetEvaluation,
    check_threshold,
    count_predictions,
    permutation_importance,
)
from fedstat.models.laser.prediction import ConformalSets, FittedNetworks, points_of, predict_networks
from fedstat.models.laser.scoring import ScoreCounts
from fedstat.models.laser.training import METHODS, TrainingFit, TrainingOptions
from fedstat.models.results import Results
from fedstat.models.vertical.layout import list_terms, site_blocks
from fedstat.models.vertical.prediction.predictor import NewEntities, columns_read, entities_of
from fedstat.models.vertical.prediction.protocol import ResponseSource, released_specs
from fedstat.plotting import COLORS, axes_for, label_y, legend_below, mark_x

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# ----------------------------------------------------------------------------------------------------
# The record of a training, and the notes of its summary: what was released, and who learned what.

HARDLY = 0.98
"""Share of the first epoch's loss above which the networks count as untrained."""
NOTES = Catalogue(
    critical={
        "not_learned": "NOT LEARNED: the loss of the validation entities has hardly decreased since the "
        "first epoch. Take more epochs (epochs=), smaller batches (batch_size=) or a larger learning_rate.",
    },
    warning={
        "last_epoch": "The last of {epochs} epochs has the smallest loss of the validation entities. Take "
        "more epochs (epochs=).",
        "partial": "Entities with only some of a site's columns count as missing there, and lack values of "
        "{terms}. Leave such columns out, or fill them in at the site.",
    },
    info={
        "no_errors": "There are no standard errors: weights of networks are not identified.",
        "calibration": "Prediction sets and intervals of predict_set() are calibrated by set of sites. They "
        "are valid for entities that are exchangeable with the calibration entities, not under covariate "
        "shift, as at a later time or in another population. With few of these, a set of sites excludes "
        "nothing.{spread}",
        "no_values": "No values of sites: {reason}{hint}.",
    },
    protocol={
        "disclosed": "{received}A receiver that knows a site's columns for a few hundred entities can "
        "predict most of their variation from such numbers. {labels}",
    },
)


@dataclass(frozen=True, slots=True, eq=False)
class LASERRecord:
    """The contents of a saved file."""

    fitted: FittedNetworks
    response: ResponseSource
    masked: bool
    n: int
    parts: tuple[int, int, int]
    blocks: tuple[CoefficientBlock, ...]
    label_epsilon: float
    partial: str = ""


def notes_of(r: LASERRecord) -> Iterator[Note]:
    """State what was revealed, and the basis of intervals."""
    hidden = (
        "The holder of the response received masked sums of the sites' outputs, over one random set "
        "of sites for each entity and batch. The sets change, so differences of sums reveal information on "
        "single sites. "
        if r.masked
        else "The holder of the response received the outputs of every site for each entity. "
    )
    if r.fitted.trained.joint:
        hidden = (
            f"The coordinator and every site received {r.fitted.trained.joint} singular vectors of "
            f"all sites' columns, for each entity that all have. {hidden}"
        )
    held = r.fitted.trained.history[:, 1]
    if held[r.fitted.trained.epoch] > HARDLY * held[0]:
        yield NOTES.note("not_learned")
    elif r.fitted.trained.epoch + 1 == len(held) > 1:
        yield NOTES.note("last_epoch", epochs=len(held))
    if r.partial:
        yield NOTES.note("partial", terms=r.partial)
    yield NOTES.note("no_errors")
    yield NOTES.note("disclosed", received=hidden, labels=_of_labels(r))
    if r.fitted.trained.scores is not None:
        spread = (
            " Under masks, each entity calibrates only one of its possible sets of sites, so the "
            "calibration entities are divided among these."
        )
        yield NOTES.note("calibration", spread=spread if r.masked else "")


def _of_labels(r: LASERRecord) -> str:
    epsilon, total = r.label_epsilon, r.fitted.trained.outcome.label_epsilon
    if not epsilon:
        return (
            "Each site learned the labels of the entities that it has: the gradients of one batch "
            "distinguish them."
        )
    return (
        "Labels were randomized before anything else. For any observer, the odds of two labels of one "
        f"entity change by exp({epsilon:g}) at most, and by exp({total:g}) over all labels that their "
        "holder has randomized. Columns are not protected, nor are labels from evaluate(). Sets, "
        "intervals and calibration results are those of randomized labels."
    )


# ----------------------------------------------------------------------------------------------------
# Plot of the learning curve.

WHOSE = {"loss": "training", "validation": "validation"}
"""Entities of a curve, for its legend."""


def draw_history(history: pd.DataFrame, kept: int, ax: Axes | None) -> Axes:
    """Losses by epoch, each relative to its first, with a mark at the epoch that was kept."""
    ax = axes_for(ax, 5.6, 3.6, "Learning curve")
    for color, (name, loss) in zip(COLORS, (history / history.iloc[0]).items(), strict=False):
        ax.plot(loss.index, loss, marker="o", markersize=3, color=color, label=WHOSE[str(name)])
    ax.set_xlabel("epoch")
    legend_below(ax)
    label_y(ax, "loss, relative to the first epoch")
    mark_x(ax, kept, f"kept: {kept}")
    return ax


# ----------------------------------------------------------------------------------------------------
# Results of a split network: predictions with any set of sites, and their releases.

NO_ERRORS = (
    "networks have no standard errors: their weights are not identified, because units are interchangeable"
)
OTHER_FIGURES = Remedy(
    "sites()",
    "{call} has the contribution of each site, predict_set() sets and intervals with a coverage, evaluate() "
    "intervals of the AUC",
)
Conditional = Literal["label"]


class NoCoefficients:
    """Placeholder for coefficients that states why there are none."""

    def __repr__(self) -> str:
        return f"<no coefficients: {NO_ERRORS}>"

    def __getattr__(self, name: object) -> NoReturn:
        raise NotAvailableError(NO_ERRORS, remedy=OTHER_FIGURES)

    __getitem__ = __getattr__

    def __iter__(self) -> NoReturn:
        self.__getattr__("iter")


class LASERResults(Results[LASERRecord], saved_as="fedstat laser results 2", record=LASERRecord):
    """Trained networks of every site, and the heads.

    Attributes
    ----------
    params : NoCoefficients
        States why networks have no standard errors.
    model_name, judged : str
        Words for tables.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_blocks(800, missing=[0.0, 0.2, 0.3], seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> fit = fs.LASER.from_formula("y > 0 ~ .", partition, hidden=[4], width=2).fit(epochs=3, seed=0)
    >>> fit.nobs, fit.method, fit.classes, len(fit.history), bool(fit.plot_history().has_data())
    (800, 'laser', (0.0, 1.0), 3, True)
    >>> most, shares = fit.predict(partition), fit.predict_proba(partition)
    >>> sets, judged, lost = fit.predict_set(partition), fit.evaluate(partition), fit.importance(partition, 2)
    >>> len(fit.sites()), fit.calibration.figures == fit.figures, "A" in fit.summary().as_text()
    (3, True, True)
    """

    model_name = "Split networks over any set of sites"
    params = NoCoefficients()

    @classmethod
    def _of(
        cls,
        model: Any,
        method: str,
        training: TrainingOptions,
        trained: TrainingFit,
        label_epsilon: float,
        ledger: Ledger,
    ) -> LASERResults:
        """Make results of a fit."""
        layout, formula = model.layout, model.formula
        fitted = FittedNetworks.of(model, method, training, trained, released_specs(model, layout.sites))
        record = LASERRecord(
            fitted,
            ResponseSource(layout.active, formula.response, tuple(formula.response_columns)),
            training.masked,
            layout.n,
            (len(training.entities), len(training.validation), len(training.calibration)),
            site_blocks(layout),
            label_epsilon,
            list_terms(layout.lacking),
        )
        return cls(record, ledger)

    # -- training --------------------------------------------------------------------------------

    @property
    def method(self) -> str:
        """Method of the fit."""
        return self._record.fitted.method

    @property
    def history(self) -> pd.DataFrame:
        """Mean loss by epoch, of the training entities and of the validation entities."""
        h = self._record.fitted.trained.history
        epochs = pd.RangeIndex(1, len(h) + 1, name="epoch")
        return pd.DataFrame(h, columns=["loss", "validation"], index=epochs)

    def plot_history(self, ax: Axes | None = None) -> Axes:
        """Plot the loss by epoch, of training and validation entities, each relative to its first."""
        return draw_history(self.history, self._record.fitted.trained.epoch + 1, ax)

    # -- predictions -----------------------------------------------------------------------------

    @property
    def classes(self) -> tuple[float, ...]:
        """Classes of the response, ascending; none for a normal one."""
        return self._record.fitted.trained.outcome.classes

    def predict_proba(self, exog: NewEntities, at: str = "average") -> pd.DataFrame:
        """Predict the probabilities of the classes of every entity, from the sites that have it.

        Parameters
        ----------
        exog : ClientPartition, table of pandas, polars or pyarrow, or dict of columns
            With one or more sites of the fit. A site that has left has no entity. A table of entities that
            you hold, with the columns of the fit, is split by site; a site has a row with a value in one
            of its columns.
        at : str
            If sites have their own heads (``heads="site"``, "local" and similar): the site whose head
            predicts, or "average" over the available heads. With a single head, there is one prediction for a
            set of sites, and nothing to average.

        Returns
        -------
        DataFrame
            (n, classes); nan if no site has the entity, or the head of `at` cannot predict it.

        Raises
        ------
        NotAvailableError
            The response is normal.
        ModelError
            The partition has no site of the fit, or `at` has no head of its own.
        """
        if not self.classes:
            raise NotAvailableError("predict_proba: the response is normal; use predict")
        head, fitted = self._head(at), self._record.fitted
        new, index = entities_of(exog, columns_read(fitted.specs))
        found = predict_networks(fitted, new, "predict_proba()", head)
        return pd.DataFrame(found.predicted, index=index, columns=list(self.classes))

    def _head(self, at: str) -> int | None:
        """Find the number of the head of a site; None for the average."""
        fitted = self._record.fitted
        if at == "average":
            return None
        if at not in fitted.sites or fitted.assembly.heads != len(fitted.sites):
            own = fitted.sites if fitted.assembly.heads == len(fitted.sites) else ()
            words = ", ".join(map(repr, ("average", *own)))
            raise ModelError(
                f"at: expected {words}, received {at!r}; sites have their own heads with heads='site', or "
                "method='local'"
            )
        return fitted.sites.index(at)

    def predict(self, exog: NewEntities, *, threshold: float | None = None) -> pd.Series:
        """Predict the mean of a normal response, otherwise the most probable class.

        New entities are a partition, or a table that you hold; see :meth:`predict_proba`.
        For two classes, the second is predicted if its probability is above the `threshold`, if one is given,
        such as that of ``result.calibration.threshold()``.
        """
        if threshold is not None:
            check_threshold(threshold, len(self.classes))
        new, index = entities_of(exog, columns_read(self._record.fitted.specs))
        found = predict_networks(self._record.fitted, new, "predict()")
        points = points_of(self._record.fitted, found.predicted, 0.5 if threshold is None else threshold)
        return pd.Series(points, index=index)

    @takes_alpha
    def predict_set(
        self,
        exog: NewEntities,
        alpha: float = 0.1,
        *,
        conditional: Conditional | None = None,
    ) -> pd.DataFrame:
        """Predict sets of classes, or intervals, with a coverage of at least 1 - alpha.

        Split conformal prediction, from entities of the fit that were not used for training, by set of sites
        (Vovk, Gammerman and Shafer 2005, section 2.2). It is valid for networks of any quality, for entities
        that are exchangeable with these, on average over fits.

        Parameters
        ----------
        exog : ClientPartition or table
            See :meth:`predict_proba`.
        alpha : float
        conditional : {"label"}, optional
            Guarantee the coverage among the entities of every class, not only over all.

        Returns
        -------
        DataFrame
            For classes one Boolean column each; for a normal response ``mean``, ``low`` and ``high``. If too
            few entities calibrate a set of sites, it has all classes, or an infinite interval;
            ``frame.attrs["note"]`` names these sets.

        Raises
        ------
        ModelError
            `alpha` is not between 0 and 1.
        NotAvailableError
            The fit has no calibration entities.
        """
        check_level("alpha", alpha)
        scores = self._scores()
        if conditional not in (None, "label") or (conditional and not self.classes):
            raise ModelError(f"conditional: expected None, or 'label' with classes, received {conditional!r}")
        new, index = entities_of(exog, columns_read(self._record.fitted.specs))
        found = predict_networks(self._record.fitted, new, "predict_set()")
        return ConformalSets(self._record.fitted, scores, alpha, conditional == "label").frame(found, index)

    def _scores(self) -> ScoreCounts:
        if self._record.fitted.trained.scores is None:
            raise NotAvailableError(
                "there are no calibration entities",
                remedy=Remedy("fit(..., calibration=0.2)", ": fit with {arguments}"),
            )
        return self._record.fitted.trained.scores

    # -- quality of predictions ----------------------------------------------------------------------

    @property
    def calibration(self) -> SetEvaluation:
        """Evaluate each set of sites on the entities that were not used for training."""
        return self._evaluation(self._scores())

    def evaluate(self, partition: ClientPartition) -> SetEvaluation:
        """Evaluate predictions against the response of another partition, by set of sites.

        The holder of the response receives the predictions and computes the results; no response leaves it.
        If its policy allows a single evaluation, it averages predictions over a few entities first, which
        changes results little. For a calibration curve see
        ``result.evaluate(partition).evaluation().plot_calibration()``.

        Parameters
        ----------
        partition : ClientPartition
            With the response, at the site that had it in the fit.

        Raises
        ------
        ModelError
            It lacks the response, or has no site.
        """
        fitted = self._record.fitted
        (scores,) = count_predictions(fitted, self._record.response, partition)
        policy = partition.sites[self._record.response.site].policy
        return replace(self._evaluation(scores), least=policy.min_count if policy.evaluation == "once" else 0)

    @takes_alpha
    def importance(
        self, partition: ClientPartition, repeats: int = 10, *, alpha: float = 0.05
    ) -> pd.DataFrame:
        """Compute the loss of predictive quality if one site's columns are permuted.

        Each site permutes its rows, with all their columns, between the entities that it has, `repeats`
        times, by permutations that only the site knows. The response's holder evaluates them as in
        :meth:`evaluate`. A site that allows only one evaluation refuses. Every repeat releases further
        outputs for each entity, which a limit on row-level values (per_entity) counts, because differences
        reveal information on single entities.

        Parameters
        ----------
        partition : ClientPartition
            With the response, at the site that had it in the fit.
        repeats : int
            Permutations of each site.
        alpha : float
            One minus the level of the intervals, for the mean over permutations of these entities.

        Returns
        -------
        DataFrame
            By site: ``importance``, the mean loss over permutations, among the entities that have the site,
            of the area under the ROC curve, of the accuracy for more than two classes, or of R-squared; its
            ``std_error``, and ``low`` and ``high``, by Student's t.

        Raises
        ------
        ModelError
            Fewer than two repeats, `alpha` is not between 0 and 1, or the partition lacks the response.

        References
        ----------
        Breiman, L. (2001). Random forests. Machine Learning 45, 5-32, section 10.
        """
        check_integer("repeats", repeats, 2)
        check_level("alpha", alpha)
        record = self._record
        return permutation_importance(record.fitted, record.response, partition, repeats, alpha)

    def _evaluation(self, scores: ScoreCounts) -> SetEvaluation:
        fitted = self._record.fitted
        return SetEvaluation(scores, fitted.sites, fitted.trained.outcome.classes, fitted.trained.sd)

    @property
    def nobs(self) -> int:
        """Entities of the fit."""
        return self._record.n

    @property
    def figures(self) -> dict[str, float]:
        """Evaluate the largest set of sites on entities that were not used for training."""
        return {} if self._record.fitted.trained.scores is None else self.calibration.figures

    judged = (
        "Results are for entities that were not used for training, and that all sites of the largest "
        "counted set have. Under masks each entity counts for one set, so this one may have few entities: "
        "compare the results of evaluate() for the same entities."
    )
    """The entities of the results, for a comparison."""

    def sites(self) -> pd.DataFrame:
        """Return the data of every site, and its contribution to predictions.

        Returns
        -------
        DataFrame
            By site: ``columns``, ``entities``, ``missing`` (share), and its Shapley ``value`` (see
            :meth:`SetEvaluation.values`), nan where not every set of sites has entities to count; a note of
            the summary states why.
        """
        rows = [(b.site, b.columns, b.entities, b.missing) for b in self._record.blocks if b.columns]
        frame = pd.DataFrame(rows, columns=["site", "columns", "entities", "missing"]).set_index("site")
        values, _ = self._values
        return frame.assign(value=np.nan if values is None else values)

    @property
    def _values(self) -> tuple[pd.Series | None, str]:
        """Shapley values of the sites, or the reason why there are none."""
        try:
            return self.calibration.values(), ""
        except NotAvailableError as error:
            return None, str(error)

    # -- printed output ---------------------------------------------------------------------------

    def tidy(self) -> pd.DataFrame:
        """One row per site: :meth:`sites` with the site as a column."""
        return self.sites().reset_index()

    def _glance(self) -> dict[str, Any]:
        """Size, training, and quality of predictions by the largest set of sites."""
        trained = self._record.fitted.trained
        figures = {} if trained.scores is None else self.calibration.figures
        return {
            "nobs": self._record.n,
            "n_sites": len(self._record.blocks),
            "epochs": trained.epoch + 1,
            "validation_loss": float(trained.history[trained.epoch, 1]),
            **{name: value for name, value in figures.items() if name != "n"},
        }

    def _sheets(self) -> Iterator[Sheet]:
        """Training and exchange, quality by set of sites, and data of each site."""
        r, fitted = self._record, self._record.fitted
        learned, held, calibrated = r.parts
        left = [
            ("Method", METHODS[self.method].words),
            ("Response", f"{r.response.text} ({fitted.kind})"),
            ("Networks", " - ".join(map(str, (*fitted.hidden, fitted.width)))),
            ("Epochs", f"{fitted.trained.epoch + 1} of {len(fitted.trained.history)} taken"),
            ("Validation loss", f"{fitted.trained.history[fitted.trained.epoch, 1]:.4f}"),
        ]
        left += [
            ("Entities", f"{r.n:,}"),
            ("training", f"{learned:,}"),
            ("validation", f"{held:,}"),
            ("calibration", f"{calibrated:,}"),
            ("Exchange", "masked sums" if r.masked else "clear"),
        ]
        if r.label_epsilon:
            left.append(("Label epsilon", f"{r.label_epsilon:g} (pure, by label)"))
        yield header_sheet(f"{self.model_name} results", left)
        if fitted.trained.scores is not None:
            yield from self.calibration._sheets(" (calibration entities)")
        yield coefficient_block_sheet(r.blocks)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.method}, {self._record.n:,} entities; see .summary()>"

    def _summary_notes(self) -> Iterator[Note]:
        yield from notes_of(self._record)
        _, reason = self._values
        if reason:
            some = self._record.fitted.trained.scores is not None
            hint = ". Fit with a larger share of calibration entities (calibration=)" if some else ""
            yield NOTES.note("no_values", reason=reason, hint=hint)
