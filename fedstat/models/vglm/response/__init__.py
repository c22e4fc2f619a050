"""The response of a fit: distributions and links, and what its holder computes."""
