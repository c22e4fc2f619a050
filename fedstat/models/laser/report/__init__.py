"""What can be said of trained networks: predictions, sets, evaluations."""
