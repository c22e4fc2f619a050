"""One private step on the score, from released moments: what is shared, what it costs, what is made of it."""
