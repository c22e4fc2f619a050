"""A complete small family of models, to be copied: ``python -m fedstat.template NAME``."""
