"""A response that is not normal, with columns of one normal law that is free between institutions."""
