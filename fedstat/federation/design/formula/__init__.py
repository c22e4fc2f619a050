"""Formula text -> a checked tree of terms; no data is seen."""
