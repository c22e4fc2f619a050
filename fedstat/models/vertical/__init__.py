"""Code shared by models of sites with different columns."""
