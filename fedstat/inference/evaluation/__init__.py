"""How well a model ranks and predicts."""
