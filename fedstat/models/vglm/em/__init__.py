"""Selection where institutions lack some entities, from moments by missing pattern."""
