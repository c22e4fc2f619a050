"""What models of sites with different columns share."""
