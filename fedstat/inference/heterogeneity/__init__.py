"""Do sites agree: tests, random effects, forest plots."""
