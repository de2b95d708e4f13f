"""gruppo: group-relative policy optimization of language models.

The pipeline is the tree; each stage is a package that can be used alone:

    prompts       gruppo.task        rows of a file become tokenised prompts
    rollouts      gruppo.sampler     prompts become groups of sampled sequences
    rewards       gruppo.reward      sequences become numbers, in processes that can be killed
    advantages    gruppo.advantage   numbers become credit within a group
    packed batch  gruppo.batch       sequences become flat tensors; the one shift by one is here
    log-probs     gruppo.kernel, gruppo.model
    loss          gruppo.loss        level, surrogate, token weights, terms, aggregation
    step          gruppo.model
    metrics       gruppo.metric
    all of it     gruppo.trainer, gruppo.cli

Importing this package imports nothing heavy; `gruppo.loss`, `.advantage`, `.metric`, `.batch` and `.kernel`
need torch and nothing else.
"""

__version__ = "0.1.0"
