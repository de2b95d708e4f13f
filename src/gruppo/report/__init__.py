"""Pictures of a run: its learning curve, and a page with charts, the ledger of tokens and a token viewer."""
