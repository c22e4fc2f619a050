"""The covariance of the estimates of VFEM: protocols and site steps."""
