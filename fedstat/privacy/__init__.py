"""What a release costs: sensitivity, noise, and accounts of both."""
