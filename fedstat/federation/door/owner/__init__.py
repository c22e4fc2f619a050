"""What a site's owner decides: the policy, its file, and what follows from a question alone."""
