"""Inference that does not depend on the model family."""
