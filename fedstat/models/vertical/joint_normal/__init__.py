"""The joint normal model of columns with missing blocks."""
