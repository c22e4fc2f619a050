"""One likelihood over rows: what a site sums for it, the steps that release the sums, and its maximum."""
