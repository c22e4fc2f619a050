"""A bucket of an object store through which questions and answers go as signed objects."""
