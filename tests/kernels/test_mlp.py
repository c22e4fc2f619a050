"""Small networks against numerical derivatives, plain numpy, and PyTorch where it is installed."""

from itertools import pairwise

import numpy as np
import pytest
from statsmodels.tools.numdiff import approx_fprime

from fedstat.kernels.split_networks import adam_step, count_parameters, draw_parameters, forward, gradient

WIDTHS = np.array([3, 5, 4, 2])


@pytest.fixture
def drawn():
    rng = np.random.default_rng(4)
    return draw_parameters(WIDTHS, rng), rng.normal(size=(3, 17)), rng.normal(size=(2, 17))


def layers(theta, widths):
    """Matrix and biases of each layer."""
    at = 0
    for a, b in pairwise(widths):
        yield theta[at : at + a * b].reshape(b, a), theta[at + a * b : at + (a + 1) * b]
        at += (a + 1) * b


def test_outputs_are_those_of_matrices(drawn):
    theta, X, _ = drawn
    *hidden, (W, b) = layers(theta, WIDTHS)
    A = X
    for V, c in hidden:
        A = np.maximum(V @ A + c[:, None], 0.0)
    np.testing.assert_allclose(forward(theta, WIDTHS, X)[-2:], W @ A + b[:, None], atol=1e-14)
    assert len(theta) == count_parameters(WIDTHS) == 3 * 5 + 5 + 5 * 4 + 4 + 4 * 2 + 2


def test_gradients_are_central_differences(drawn):
    theta, X, D = drawn
    g, of_columns = gradient(theta, WIDTHS, forward(theta, WIDTHS, X), D)

    def loss(point, columns):
        return float((forward(point, WIDTHS, columns)[-2:] * D).sum())

    numeric = approx_fprime(theta, loss, args=(X,), centered=True)
    np.testing.assert_allclose(g, numeric.ravel(), atol=1e-7)
    numeric = approx_fprime(X.ravel(), lambda x: loss(theta, x.reshape(X.shape)), centered=True)
    np.testing.assert_allclose(of_columns.ravel(), numeric.ravel(), atol=1e-7)


def test_training_is_that_of_pytorch(drawn):
    torch = pytest.importorskip("torch")
    theta, X, D = drawn
    parts = [torch.nn.Linear(int(a), int(b)).double() for a, b in pairwise(WIDTHS)]
    for part, (W, b) in zip(parts, layers(theta, WIDTHS), strict=True):
        part.weight.data, part.bias.data = torch.tensor(W), torch.tensor(b)
    net = torch.nn.Sequential(parts[0], torch.nn.ReLU(), parts[1], torch.nn.ReLU(), parts[2])
    adam = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=1e-3)
    first, second = np.zeros_like(theta), np.zeros_like(theta)
    for step in range(1, 41):
        adam.zero_grad()
        (net(torch.tensor(X.T)) * torch.tensor(D.T)).sum().backward()
        adam.step()
        g, _ = gradient(theta, WIDTHS, forward(theta, WIDTHS, X), D)
        adam_step(theta, g, first, second, step, 0.01, 1e-3)
    found = np.concatenate([p.detach().numpy().ravel() for p in net.parameters()])
    np.testing.assert_allclose(found, theta, atol=1e-10)
