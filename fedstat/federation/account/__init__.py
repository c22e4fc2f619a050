"""The account of what passed: ledger, chain, receipt and its verification."""
