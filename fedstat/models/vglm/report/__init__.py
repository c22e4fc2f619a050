"""From the outcome of a fit to what is printed, drawn, predicted and saved."""
