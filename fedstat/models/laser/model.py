"""Split networks: arguments, dry run, and the fit."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

import numpy as np

from fedstat.docstrings import inherits_params, inherits_signature
from fedstat.errors import DataWarning, EstimationError, ModelError, Remedy, warn
from fedstat.federation.crypto.masks import hides
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.design.vertical_design import MissingRule
from fedstat.federation.dry_run.expected_releases import ExpectedReleases
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models import checks
from fedstat.models.explain import DryRunPlan
from fedstat.models.laser.networks import Optimizer
from fedstat.models.laser.protocol import Trainer
from fedstat.models.laser.request import FAMILY, MOST_EPSILON, Outcome, OutcomeRequest
from fedstat.models.laser.results import LASERResults
from fedstat.models.laser.torch_modules import check_module, register_module
from fedstat.models.laser.training import METHODS, HeadLayout, Method, TrainingOptions, assemble
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.models.vertical.layout import Layout, lay_out
from fedstat.models.vertical.model import VerticalModel
from fedstat.progress_line import ProgressLine
from fedstat.typing import Ints

# ----------------------------------------------------------------------------------------------------
# Threat statements on the exchange of a split network, before it begins.


class LASERPlan(DryRunPlan):
    """Plan whose rounds follow from the numbers of entities and epochs alone."""

    def learned(self, expected: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """State what outputs and gradients reveal."""
        if self.given["method"] == "vfedtrans":
            yield (
                "coordinator",
                "sums of products of all columns, and the leading singular vectors of every entity that "
                "all sites have. Together these determine the columns, except for their components along "
                "the other singular vectors",
            )
            yield (
                "each site",
                "the same singular vectors, without the weights of the other sites' columns. A site that "
                "knows the other columns for a few entities can predict them for the rest",
            )
        epsilon = self.given["label_epsilon"]
        yield (
            "each site",
            "the labels of the entities that it learns from: the gradients of one batch distinguish them, "
            "even if no label is known"
            if not epsilon
            else f"labels that were randomized at epsilon {epsilon:g}: the odds of two labels of one entity "
            f"change by exp({epsilon:g}) at most; other responses or epsilons of the same entities add to it",
        )
        yield (
            "holder of the response",
            "much of each site's columns from its networks' outputs, if it knows these columns for a few "
            "hundred entities; masked sums slow this down, but do not prevent it",
        )


# ----------------------------------------------------------------------------------------------------
# A line that reports the progress of the training.


class EpochProgress(ProgressLine):
    """Report every epoch, with losses, and the remaining time."""

    def __init__(self, epochs: int) -> None:
        super().__init__("epoch", epochs)

    def __call__(self, epoch: int, loss: float, ahead: float) -> None:
        """Report an epoch, counted from zero."""
        self.step(epoch + 1, f"loss {loss:.4f}  held back {ahead:.4f}")


# ----------------------------------------------------------------------------------------------------
# The user's side of a split network: arguments in, results out.

MOST_CLIENTS = 60


BATCHES, SMALLEST_BATCH = 8, 32
"""Smallest default number of batches per epoch, unless batches would be smaller than the next value."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Length and step size of the training."""

    epochs: int
    batch_size: int
    learning_rate: float
    decay: float
    balanced: bool

    def __post_init__(self) -> None:
        """Refuse numbers without meaning."""
        checks.check_integer("epochs", self.epochs, 1)
        checks.check_integer("batch_size", self.batch_size, 2)
        checks.check_positive("learning_rate", self.learning_rate)
        if not self.decay >= 0.0:
            raise ModelError(f"decay: expected a penalty of zero or more, received {self.decay!r}")

    def chosen(self, **given: Any) -> Self:
        """Return the schedule with the given values replaced."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


DEFAULTS = Schedule(12, 1024, 5e-3, 1e-4, False)
PUBLISHED = Schedule(100, 128, 1e-4, 1e-3, True)
INVENTED = {
    "binary": DistributionSpec("Binomial", "Logit"),
    "multiclass": DistributionSpec("Poisson", "Log"),
    "normal": DistributionSpec("Gaussian", "Identity"),
}
"""Distribution from which a dry run draws responses."""


class LASER(VerticalModel):
    """Networks on several sites' columns that learn from, and predict with, any set of sites.

    Each site has a network on its own columns. The holder of the response has a head whose input is the mean
    of the networks' outputs over a set of sites. The loss of an entity is the sum over all sets of sites that
    have it, so that the head can predict with any of these sets.

    Make one with :meth:`from_formula`.

    Parameters
    ----------
    formula : Formula
        A parsed formula; the left side of a classification is a column of numbers, or a comparison.
    partition : ClientPartition
        In the vertical layout.
    outcome : {"binary", "multiclass", "normal"}
        Kind of the response.
    hidden : sequence of int
        Units of the hidden layers of every site's network, with rectified linear activation.
    width : int
        Outputs of every site's network.
    head_hidden : sequence of int
        Units of the hidden layers of the head; none by default, so the scores are sums over sites.
    heads : {"one", "site"}
        Whether one head predicts for a set of sites, or one head for each of its sites, as in the
        publication, whose probabilities are averaged.
    representations : mapping of str to torch.nn.Module, optional
        Modules that replace the networks of some sites, from (rows, columns) to (rows, `width`). They run
        where they were made, in double precision, and start with their present parameters. Requires
        ``fedstat[torch]``.
    missing, coordinator
        See :meth:`from_formula`.

    Raises
    ------
    ModelError
        An argument has no meaning here, or no entity has a response and a site.

    References
    ----------
    Valdeira, P., Wang, S. and Chi, Y. (2024). Vertical federated learning with missing features during
    training and inference. arXiv 2410.22564.

    Huang, C., Wang, L. and Han, X. (2023). Vertical federated knowledge transfer via representation
    distillation for healthcare collaboration networks. Proceedings of the ACM Web Conference, 4188-4199.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_blocks(600, missing=[0.0, 0.2, 0.3], seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> model = fs.LASER.from_formula("y ~ .", partition, outcome="normal", hidden=[4], width=2)
    >>> model.fit(epochs=3, seed=0).nobs
    600
    """

    family: ClassVar[str] = FAMILY
    _plan = LASERPlan

    @checks.takes_parsed
    def __init__(
        self,
        formula: Formula,
        partition: Any,
        *,
        outcome: Outcome = "binary",
        hidden: Sequence[int] = (10, 10),
        width: int = 10,
        head_hidden: Sequence[int] = (),
        heads: HeadLayout = "one",
        representations: Mapping[str, Any] | None = None,
        missing: MissingRule = "raise",
        coordinator: str | None = None,
    ) -> None:
        checks.check_choice("outcome", outcome, get_args(Outcome))
        checks.check_choice("heads", heads, get_args(HeadLayout))
        for name, units in (("hidden", hidden), ("head_hidden", head_hidden)):
            if isinstance(units, int) or not all(
                isinstance(one, int | np.integer) and one > 0 for one in units
            ):
                raise ModelError(f"{name}: expected units of layers, as in (10, 10), received {units!r}")
        checks.check_integer("width", width, 1)
        self.outcome: Outcome = outcome
        self.distribution = INVENTED[outcome]
        self.hidden, self.head_hidden = tuple(map(int, hidden)), tuple(map(int, head_hidden))
        self.width, self.heads = int(width), heads
        super().__init__(formula, partition, missing=missing, coordinator=coordinator)
        self.layout = self._lay_out()
        self.representations = dict(representations or {})
        unknown = sorted(self.representations.keys() - set(self.layout.sites))
        if unknown:
            raise ModelError(
                f"representations: {', '.join(unknown)} have no columns in the model; expected some of "
                f"{', '.join(self.layout.sites)}"
            )
        self._modules = {k: f"{k} {secrets.token_hex(8)}" for k in self.representations}
        self._begun = {k: deepcopy(module) for k, module in self.representations.items()}

    @classmethod
    @checks.checks_arguments
    @inherits_params(VerticalModel.from_formula)
    @inherits_signature(__init__)
    def from_formula(cls, formula: str, partition: ClientPartition, **options: Any) -> Self:
        """Make a model from a formula.

        Parameters
        ----------
        formula, partition
            As in :meth:`VerticalModel.from_formula`.
        outcome, hidden, width, head_hidden, heads, representations
            See the class.
        missing, coordinator
            As in :meth:`VerticalModel.from_formula`.

        Raises
        ------
        FormulaError, DesignError
            As :meth:`VerticalGLM.from_formula`.
        ModelError
            See the class.

        Examples
        --------
        >>> import fedstat as fs
        >>> data = fs.datasets.make_blocks(300, missing=[0.0, 0.2, 0.3], seed=1)
        >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
        >>> fs.LASER.from_formula("y ~ .", partition, outcome="normal").width
        10
        """
        return super().from_formula(formula, partition, **options)

    def _lay_out(self) -> Layout:
        blocks = self.design.blocks
        if not blocks:
            raise ModelError(f"'{self.formula.text}' has no columns; a network needs some")
        if len(blocks) > MOST_CLIENTS:
            raise ModelError(f"expected at most {MOST_CLIENTS} sites with columns, received {len(blocks)}")
        seen = np.zeros(self.design.n, dtype=np.bool_)
        for block in blocks:
            seen[block.rows[block.complete]] = True
        if not seen.any():
            raise EstimationError("no entity with a response has a site with all of its columns")
        nobody = int((~seen).sum())
        if nobody:
            warn(
                f"{nobody:,} entities have a response but no site's columns, and are left out",
                DataWarning,
            )
        return lay_out(self.design, blocks, seen)

    @checks.checks_arguments
    def fit(
        self,
        *,
        method: Method = "laser",
        paper: bool = False,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        decay: float | None = None,
        balanced: bool | None = None,
        standardize: bool = True,
        compress: bool | None = None,
        validation: float = 0.1,
        calibration: float = 0.2,
        label_epsilon: float | None = None,
        masked: bool | None = None,
        seed: int = 0,
        progress: bool | None = None,
        checkpoint: str | Path | None = None,
    ) -> LASERResults:
        """Train the networks.

        Parameters
        ----------
        method : {"laser", "local", "standard", "ensemble", "combinatorial", "vfedtrans"}
            "laser", or one of the methods for comparison: "local", each site alone; "ensemble", a vote of
            these, with ties at random; "standard", one network over all sites, trained on complete entities,
            which predicts at random where a site is missing; "combinatorial", separate networks for each set
            of sites; "vfedtrans" (Huang, Wang and Han 2023), each site alone, from its columns and from the
            `width` leading singular vectors of all sites' columns, which it learns to predict. The singular
            vectors come from secure products over the complete entities, and are sent to every site. With
            their weights, which the coordinator has, they determine the columns, except for their components
            along the other singular vectors.
        paper : bool
            Use the defaults of the publication instead: 100 epochs in batches of 128, a learning rate of
            1e-4, a penalty of 1e-3, and equal class weights. This takes a hundred times the rounds.
        epochs, batch_size : int
            Number of epochs and of entities in a batch: 12 and 1,024, or an eighth of the training entities
            if these are fewer than 8,192.
        learning_rate, decay : float
            Learning rate and L2 penalty of Adam: 5e-3 and 1e-4.
        balanced : bool
            Give every class the same weight in the loss. This shifts predictions towards rare classes, so
            probabilities no longer match the frequencies in the data.
        standardize : bool
            Whether sites standardize their columns.
        compress : bool, optional
            Whether columns with heavy tails, such as amounts and ratios of balance sheets, enter as asinh of
            robust units: location and scale by maximum likelihood of a t distribution with three degrees of
            freedom, which each site releases for such columns. A column has heavy tails if its standard
            deviation is more than twice this scale. By default True, unless `paper` or not `standardize`.
        validation : float
            Share of the entities that are not used for training; their loss selects the epoch.
        calibration : float
            Share of the entities that are used only for prediction sets and intervals. With masked
            sums, each of them represents one set of sites, because sums over two sets would reveal their
            difference: of 4,800 entities at four sites, each of 15 sets has 320. Without masks, all represent
            every set.
        label_epsilon : float, optional
            Randomize the labels once, at their holder, so that all later releases are private by label. For
            any observer, the odds of two labels of one entity change by exp(label_epsilon) at most (Kairouz,
            Oh and Viswanath 2016). The likelihood is that of the randomized labels. The same labels at the
            same epsilon are randomized alike in every fit; others have their own cost.
        masked : bool, optional
            Whether the outputs of the sites' networks are added up under pairwise masks, over one random set
            of sites for each entity of a batch, which represents all of its sets. This is the default with at
            least three sites and a method of one network per site. If False, the holder of the response
            receives the outputs of each site, and uses all sets.
        seed : int
            Seed of parameters, splits, batches and sets.
        progress : bool, optional
            Write a line for each epoch to the standard error.
        checkpoint : str or Path, optional
            A file that stores the training after every epoch. If the training is interrupted, for instance
            because a site was stopped, the same fit continues from there and ends in the same networks. For
            this purpose, parameters and the moments of Adam leave the sites in every epoch.

        Returns
        -------
        LASERResults

        Raises
        ------
        ModelError
            An argument has no meaning here.
        EstimationError
            The loss is not finite, or too few entities remain for training.
        PolicyError
            A site refuses a release.

        Warns
        -----
        DisclosureWarning
            Two sites with masks: each part of a sum follows from the other.

        Examples
        --------
        >>> import fedstat as fs
        >>> data = fs.datasets.make_blocks(600, missing=[0.0, 0.2, 0.3], seed=1)
        >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
        >>> model = fs.LASER.from_formula("y > 0 ~ .", partition, hidden=[4], width=2)
        >>> model.fit(method="standard", epochs=2, seed=0)
        <LASERResults: standard, 600 entities; see .summary()>
        """
        call = Call.of(self.fit, locals())
        checks.check_choice("method", method, get_args(Method))
        masked = self._masks_outputs(method, masked)
        schedule = (PUBLISHED if paper else DEFAULTS).chosen(
            epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, decay=decay, balanced=balanced
        )
        checks.check_integer("seed", seed, 0)
        for name, share in (("validation", validation), ("calibration", calibration)):
            checks.check_share(name, share)
        # A response without classes has no weights; its holder refuses balanced=True.
        weighed = schedule.balanced and (self.outcome != "normal" or balanced is not None)
        request = self._outcome_request(label_epsilon, weighed)
        rng = np.random.default_rng(seed)
        learned, held, calibrated = self._divide(method, validation, calibration, rng)
        if batch_size is None:
            most = min(schedule.batch_size, max(SMALLEST_BATCH, len(learned) // BATCHES))
            schedule = schedule.chosen(batch_size=most)
        self._register_modules(method)
        training = TrainingOptions(
            self.hidden,
            self.width,
            self.head_hidden,
            int(schedule.batch_size),
            int(schedule.epochs),
            Optimizer(float(schedule.learning_rate), float(schedule.decay)),
            int(seed),
            masked,
            learned,
            held,
            calibrated,
            METHODS[method].vote,
            not standardize,
            (standardize and not paper) if compress is None else compress,
            METHODS[method].transfer,
            self._modules,
        )
        kept = None if checkpoint is None else Path(checkpoint)
        return run_fit(self, call, LASER._train, method, training, request, rng, kept)

    def _outcome_request(self, label_epsilon: float | None, balanced: bool) -> OutcomeRequest:
        """Describe the response to its holder, with the epsilon of its randomized labels."""
        if label_epsilon is not None:
            checks.check_positive("label_epsilon", label_epsilon)
            if self.outcome == "normal" or label_epsilon >= MOST_EPSILON:
                raise ModelError(
                    f"label_epsilon: expected classes, and a number below {MOST_EPSILON:g}; received "
                    f"{label_epsilon!r} for a {self.outcome} response"
                )
        return OutcomeRequest(
            self.outcome, float(label_epsilon or 0.0), bool(balanced), self.formula.response
        )

    def _register_modules(self, method: Method) -> None:
        """Give each site with its own module a copy, for this fit."""
        how, columns = METHODS[method], dict(zip(self.layout.sites, self.layout.sizes, strict=True))
        if self._begun and not how.modules:
            raise ModelError(
                "representations: a site has only one module, on its own columns; use another method than "
                f"{method!r}"
            )
        if len(columns) < how.least:
            raise ModelError(
                f"method={method!r} requires two sites or more",
                remedy=Remedy("fit(..., method='local')", "use {arguments}"),
            )
        for k, name in self._modules.items():
            check_module(k, self._begun[k], int(columns[k]), self.width)
            # Each fit starts with the parameters that the module had.
            register_module(name, deepcopy(self._begun[k]))

    def _train(
        self,
        attempt: FitAttempt,
        method: Method,
        training: TrainingOptions,
        request: OutcomeRequest,
        rng: np.random.Generator,
        checkpoint: Path | None,
    ) -> LASERResults:
        sites = self.layout.sites
        layout = self._with_dealer(self.layout) if training.transfer else self.layout
        architecture = assemble(method, len(sites), self.heads)
        lines = EpochProgress(training.epochs)  # after all that may fail
        trainer = Trainer(
            layout,
            architecture,
            method == "laser",
            training,
            request,
            SecureProductSession(FAMILY, self._session, self._agreement.at, least=self.layout.least),
            rng,
            lines,
            checkpoint,
        )
        try:
            trained = attempt.run(trainer.run(), sites if training.masked else ())
        finally:
            lines.close()
        return LASERResults._of(self, method, training, trained, request.label_epsilon, attempt.ledger)

    def _masks_outputs(self, method: Method, masked: bool | None) -> bool:
        """Whether outputs are added up with masks."""
        K, sums = len(self.layout.sites), METHODS[method].sums
        if masked is None:
            return hides(K) and sums
        checks.check_choice("masked", masked, (True, False))
        if masked and (K < 2 or not sums):
            raise ModelError(
                "masked=True adds up one network of each of several sites, and requires method='laser' or "
                f"'standard'; received {K} sites and method={method!r}",
                remedy=Remedy("fit(..., masked=False)", "Use {arguments}"),
            )
        return masked

    def _divide(
        self, method: Method, validation: float, calibration: float, rng: np.random.Generator
    ) -> tuple[Ints, Ints, Ints]:
        """Split the entities at random into training, validation and calibration."""
        layout = self.layout
        order = rng.permutation(layout.n)
        cut = [round(calibration * layout.n), round((calibration + validation) * layout.n)]
        calibrated, held, learned = np.split(order, cut)
        if METHODS[method].complete:
            complete = np.logical_not(layout.missing.any(axis=1))[layout.code]
            calibrated, held, learned = (part[complete[part]] for part in (calibrated, held, learned))
        if len(learned) < 2:
            raise EstimationError(f"{len(learned)} entities remain for training; at least two are needed")
        return learned, np.sort(held), np.sort(calibrated)
