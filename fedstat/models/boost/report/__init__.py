"""Effects, predictions and pictures."""
