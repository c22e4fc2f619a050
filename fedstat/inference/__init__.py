"""From numbers to statements."""
