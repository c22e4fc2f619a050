"""Audit: the event log, the ledgers, the receipt of a run and its verification."""
