"""The exchange of sums of products between sites with different columns."""
