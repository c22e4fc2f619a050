"""A folder through which questions and answers go as signed files, as both sides see it."""
