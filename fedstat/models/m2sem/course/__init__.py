"""The course of a fit, as the coordinator sees it."""
