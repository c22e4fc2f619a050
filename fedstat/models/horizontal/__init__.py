"""What families over sites with different rows share."""
