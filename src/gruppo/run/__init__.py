"""Records of a run: the directory it writes, what reads it back, and what a person sees meanwhile.

Nothing here imports the trainer or the model, so that a report, a viewer or a replay can read a run without them.
`RunReader` needs no torch either. `docs/run_directory.md` describes the files.
"""
