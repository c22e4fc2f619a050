"""The one way out of an institution: site, state, policy and guards."""
