"""Mixtures of factor models: group penalties by one root, continuous columns, categorical ones on nodes."""
