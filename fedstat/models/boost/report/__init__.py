"""Effects, predictions, plots and refits from the sums of boosting."""
