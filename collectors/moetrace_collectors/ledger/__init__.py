"""The ledger of placement changes: what was proposed, announced, applied, and what it did."""
