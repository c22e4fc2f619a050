"""Training of split networks: batches, networks, heads, and what each site answers."""
