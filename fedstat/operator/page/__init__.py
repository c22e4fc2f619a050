"""The owner's page in a browser: pending plans, releases, and the policy of a site."""
