"""The price of a release: sensitivity, noise, and accounts of both."""
