"""Disclosure control: the site, its policy, and the checks that decide what may be released."""
