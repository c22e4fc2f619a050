"""What a fit is said to mean: estimates as they are reported, notes, tests of assumptions, smaller models."""
