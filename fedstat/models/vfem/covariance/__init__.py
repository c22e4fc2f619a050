"""The covariance of the estimates: observed, expected and robust information, supplemented EM."""
