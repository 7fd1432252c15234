"""Run `trainshort` with a model whose loss is not finite in one training step, on one rank.

Environment variables:

- NAN_AT: the training step, counted from 1
- NAN_RANK: the rank
- NAN_VALUE: the factor of the loss, such as "nan" or "inf"
"""

import os

import trainshort.train.loop
from trainshort.cli.main import main
from trainshort.model.transformer import Loss, TransformerLM

original_forward = TransformerLM.forward
original_accumulate = trainshort.train.loop._accumulate_gradients
target_step = int(os.environ["NAN_AT"])
target_rank = os.environ["NAN_RANK"]
factor = float(os.environ["NAN_VALUE"])
current_step = 0


def accumulate(job, step, *arguments):
    """Call the original function, and store the number of the training step."""
    global current_step
    current_step = step + 1
    return original_accumulate(job, step, *arguments)


def forward(self, *arguments, **options):
    """Call the original method, and multiply the loss in the training step that was chosen."""
    loss = original_forward(self, *arguments, **options)
    is_target_rank = os.environ.get("RANK", "0") == target_rank
    if self.training and current_step == target_step and is_target_rank:
        return Loss(loss.total * factor, loss.count)
    return loss


trainshort.train.loop._accumulate_gradients = accumulate
TransformerLM.forward = forward
main()
