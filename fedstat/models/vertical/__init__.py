"""What families over sites with different columns share."""
