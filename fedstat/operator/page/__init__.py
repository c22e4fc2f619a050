"""The owner's page: what waits at a site, what left it and what its policy lets leave, in a browser."""
