"""One analysis as a job of NVIDIA FLARE, for federations that run their own server and provisioning.

The job folder has an ``analysis.toml``. The server side of the job reads it, connects to the sites of the
job with the coordinator's folder, which ``local/fedstat`` of the server's kit names, and writes the results
into its run folder, from which ``nvflare job download`` takes them. A job has no code: an analysis is a name
of this package with plain arguments. ::

    analysis = "FederatedOLS"       # a model, or a function of a partition such as "table_one"
    formula = "y ~ age + C(sex)"
    purpose = "Does age predict y?"
    [arguments]                     # of from_formula, or of the function
    [fit]                           # of fit
    masked = true

The person that sites record is the submitter of the job, whose certificate the FLARE server has verified.
The study is that of FLARE, unless it is FLARE's default; the sites are the clients of the job.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from fedstat.codec import from_plain
from fedstat.errors import EngineError, FedstatError, FedstatWarning, PartitionError, warn
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.partition.federation_file import coordinator_identity, join_remedy, read_federation
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.transport.flare import provision
from fedstat.federation.transport.flare.job import FlareController
from fedstat.federation.transport.mailbox import STATUS_OF_NOTES
from fedstat.federation.transport.signed import open_reply, sign_request
from fedstat.federation.transport.site_folder import read_toml

RESULTS, DEFAULT_STUDY = "fedstat", "default"
"""Folder of the results in the run folder of the job; FLARE's name for the study of jobs without one."""
ERROR = "error.txt"
UNFINISHED = (
    "FLARE ended the job before its analysis was complete: a site or the server stopped. Sites of "
    "the job: {sites}. 'nvflare job meta JOB' names the clients that were lost\n"
)


@dataclass(frozen=True, slots=True)
class JobAnalysis:
    """What ``analysis.toml`` says."""

    analysis: str
    formula: str = ""
    purpose: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fit: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> JobAnalysis:
        """Read the file of a job; PartitionError if it is not complete."""
        content = read_toml(path, "write it into the config folder of the job")
        free = {name: content.pop(name, {}) for name in ("arguments", "fit")}
        for name, table in free.items():
            if not isinstance(table, dict):
                raise PartitionError(f"'{path.name}': expected a table [{name}]")
        found = from_plain(_Fixed, content, f"'{path.name}'", PartitionError, defaults=True)
        return cls(found.analysis, found.formula, found.purpose, **free)

    def run(self, partition: ClientPartition) -> Any:
        """Carry out the analysis; PartitionError if this package has no such model or function."""
        package = import_module("fedstat")
        found: Any = getattr(package, self.analysis, None) if self.analysis in package.__all__ else None
        if hasattr(found, "from_formula"):
            _refuse_paths(found.from_formula, self.arguments)
            model = found.from_formula(self.formula, partition, **self.arguments)
            _refuse_paths(model.fit, self.fit)
            return model.fit(**self.fit)
        if callable(found) and not isinstance(found, type):
            parameters = list(inspect.signature(found).parameters)
            if parameters[:1] == ["partition"]:
                _refuse_paths(found, self.arguments)
                given = {"formula": self.formula} if self.formula and "formula" in parameters else {}
                return found(partition, **given, **self.arguments)
        raise PartitionError(
            f"analysis = '{self.analysis}': expected a model with a formula, or a function of a partition"
        )


def _refuse_paths(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse arguments that name files: a job would read or write them on the server."""
    for name, parameter in inspect.signature(function).parameters.items():
        if name in given and "Path" in str(parameter.annotation):
            raise PartitionError(f"a job may not set '{name}', which is a file of the server")


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Entries of fixed types."""

    analysis: str
    formula: str = ""
    purpose: str = ""


@dataclass(frozen=True, slots=True)
class JobTransport:
    """Requests of the server side of a job to its sites."""

    controller: FlareController
    identity: Identity
    fingerprints: Mapping[str, str]
    timeout: float
    bundles: ClassVar[bool] = True

    def send(self, site: str, request: bytes) -> bytes:
        """Send one request, and wait for its reply; errors are those of a transport."""

        def tell(why: str) -> None:
            warn(f"'{site}': {STATUS_OF_NOTES[why]}", FedstatWarning)

        number, question = sign_request(self.identity, site, request)
        problem, answer = self.controller.forward(site, question, self.timeout, tell)
        if problem:
            raise EngineError(f"'{site}' did not answer: {problem}")
        return open_reply(answer, self.fingerprints[site], site, number, f"the reply of '{site}'")


class FlareAnalysis(FlareController):
    """The server side of a job that carries out one analysis, and ends; see :class:`FlareController`."""

    def control_flow(self, abort_signal: Any, fl_ctx: Any) -> None:
        """Wait for the sites, carry out the analysis, and write the results."""
        self._abort = abort_signal
        workspace, job = self._engine.get_workspace(), fl_ctx.get_job_id()
        results = Path(workspace.get_run_dir(job), RESULTS)
        results.mkdir(parents=True, exist_ok=True)
        # FLARE ends this process when a site of the job has stopped: what is here then stays.
        (results / ERROR).write_text(UNFINISHED.format(sites=", ".join(self.site_names())), encoding="utf-8")
        self.wait_for_sites()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", FedstatWarning)
            try:
                analysis = JobAnalysis.read(Path(workspace.get_app_config_dir(job), provision.ANALYSIS_FILE))
                folder = provision.owner_folder(workspace.get_root_dir(), provision.SIMULATED_SERVER)
                meta = _read_meta(Path(workspace.get_job_meta_path(job)))
                write_results(analysis.run(self._connect(folder, analysis, meta)), results)
                (results / ERROR).unlink()
            except (FedstatError, TypeError, ValueError, ImportError) as error:
                if abort_signal.triggered:  # what is here then stays: the error names any site of the job
                    return
                (results / ERROR).write_text(f"{error}\n", encoding="utf-8")
                self.system_panic(f"the analysis ended with {type(error).__name__}: {error}", fl_ctx)
            finally:
                notes = dict.fromkeys(str(one.message) for one in said)
                (results / "notes.txt").write_text("".join(f"{note}\n" for note in notes), encoding="utf-8")

    def _connect(self, folder: Path, analysis: JobAnalysis, meta: Mapping[str, Any]) -> ClientPartition:
        """Connect to the sites of the job; PartitionError for a client that is no site of the coordinator."""
        federation, here = read_federation(folder), self.site_names()
        if unknown := sorted(set(here) - set(federation.sites)):
            raise PartitionError(
                f"{', '.join(unknown)}: the coordinator has no card of these clients. Leave them out of the "
                "job",
                remedy=join_remedy(folder),
            )
        identity = coordinator_identity(folder)
        transport = JobTransport(self, identity, federation.sites, self._timeout)
        study = str(meta.get("study") or DEFAULT_STUDY)
        return ClientPartition.connect(
            folder,
            without=[site for site in federation.sites if site not in here],
            transport=transport,
            person=str(meta.get("submitter_name") or ""),
            study="" if study == DEFAULT_STUDY else study,
            purpose=analysis.purpose,
        )


def write_results(result: Any, folder: Path) -> None:
    """Write what a result has: its summary, the table of estimates, the receipt, and the result itself."""
    summary = result.summary() if hasattr(result, "summary") else result
    (folder / "summary.txt").write_text(f"{summary}\n", encoding="utf-8")
    writers: Mapping[str, tuple[str, Callable[[Any, Path], object]]] = {
        "tidy": ("estimates.csv", lambda one, path: one.tidy().to_csv(path)),
        "receipt": ("receipt.json", lambda one, path: one.receipt().save(path)),
        "save": ("result.fed", lambda one, path: one.save(path)),
    }
    for method, (name, write) in writers.items():
        if hasattr(result, method):
            try:
                write(result, folder / name)
            except FedstatError as error:  # such as a result that has no receipt
                warn(f"'{name}' was not written: {error}", FedstatWarning)


def _read_meta(path: Path) -> Mapping[str, Any]:
    """Read what FLARE knows of a job; empty in the simulator, which has no submitter."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
