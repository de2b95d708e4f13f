"""Reports of a run: a learning curve, and an HTML page with charts, a token ledger and a token viewer."""
