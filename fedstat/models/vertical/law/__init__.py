"""The normal law of columns and response, free or with edges left out, from pattern moments."""
