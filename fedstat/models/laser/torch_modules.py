"""PyTorch modules as networks of a site (optional extra ``torch``).

A module is not sent: a site knows it by a name, in the process that made it or in which its owner serves. Its
parameters are sent, as those of other networks; training is the same, with Adam's steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from importlib import import_module
from typing import Any, Self

import numpy as np

from fedstat.errors import MessageError, ModelError
from fedstat.models.laser.networks import Networks, Optimizer
from fedstat.typing import Floats

MODULES: dict[str, Any] = {}
"""Modules by the name in a request."""


def torch() -> Any:
    """Import PyTorch.

    Raises
    ------
    ModelError
        It is not installed.
    """
    try:
        return import_module("torch")
    except ImportError as error:
        raise ModelError("representations need PyTorch: pip install 'fedstat[torch]'") from error


def register_module(name: str, module: Any) -> None:
    """Let a site of this process run a module, in double precision, under a name.

    Parameters
    ----------
    name : str
    module : torch.nn.Module
        From (rows, columns) to (rows, outputs).
    """
    if not isinstance(module, torch().nn.Module):
        raise ModelError(f"representations: expected a torch.nn.Module, received {type(module).__name__}")
    MODULES[name] = module.double()


def check_module(site: str, module: Any, columns: int, width: int) -> None:
    """Require a module from (rows, `columns`) to (rows, `width`); a ModelError that names the site."""
    if not isinstance(module, torch().nn.Module):
        raise ModelError(
            f"representations: expected a torch.nn.Module for '{site}', received {type(module).__name__}"
        )
    try:
        found = tuple(deepcopy(module).double()(torch().zeros(2, columns, dtype=torch().float64)).shape)
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"representations: the module of '{site}' does not run on (rows, {columns}), the shape of its "
            "columns in the model; give its first layer that width"
        ) from error
    if found != (2, width):
        raise ModelError(
            f"representations: the module of '{site}' returns {found} for (2, {columns}), expected "
            f"(2, {width}), of which {width} is the argument width"
        )


class ModuleNetworks(Networks):
    """A module as the one network of a site; its parameters as a vector, (1, q)."""

    module: Any
    graph: Any = None

    @classmethod
    def of(cls, name: str, columns: int, width: int, optimizer: Optimizer) -> Self:
        """Select a module that is registered here.

        A MessageError if there is none, or it has other widths.
        """
        if name not in MODULES:
            raise MessageError(
                "the module of this site is not known in this process: it stays where it was made. "
                "A process has the modules of models that it made, and those given to register_module"
            )
        module = MODULES[name]
        theta = _vector(module)
        networks = cls(np.array([columns, theta.shape[1], width], dtype=np.int64), theta, optimizer)
        networks.module = module
        if networks.output(networks.activate(0, np.zeros((columns, 2)))).shape != (width, 2):
            raise MessageError(f"a module of a site does not return (rows, {width}) for (rows, {columns})")
        return networks

    def activate(self, i: int, X: Floats) -> Floats:
        """Return outputs on columns (p, rows); the graph is kept for :meth:`back`."""
        _load(self.module, self.theta[i])
        self.graph = self.module(torch().from_numpy(np.ascontiguousarray(X.T)))
        return np.ascontiguousarray(self.graph.detach().numpy().T)

    def back(self, i: int, A: Floats, D: Floats) -> Floats:
        """Differentiate a loss by the parameters."""
        self.module.zero_grad()
        self.graph.backward(torch().from_numpy(np.ascontiguousarray(D.T)))
        grads = [p.grad if p.grad is not None else torch().zeros_like(p) for p in self.module.parameters()]
        return np.concatenate([g.numpy().ravel() for g in grads])


def evaluate_module(name: str, theta: Floats, width: int, X: Floats) -> Floats:
    """Return the outputs of a module with parameters (1, q) on rows (n, p): (n, 1, d)."""
    networks = ModuleNetworks.of(name, X.shape[1], width, Optimizer(1.0, 0.0))
    if theta.shape != networks.theta.shape:
        raise MessageError("parameters of another module")
    networks.theta = theta
    return networks.activate(0, np.ascontiguousarray(X.T)).T[:, None]


def _vector(module: Any) -> Floats:
    parts: Sequence[Floats] = [p.detach().numpy().ravel() for p in module.parameters()]
    return np.concatenate(parts)[None]


def _load(module: Any, theta: Floats) -> None:
    with torch().no_grad():
        torch().nn.utils.vector_to_parameters(torch().from_numpy(theta.copy()), module.parameters())
