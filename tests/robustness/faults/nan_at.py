"""Runs `trainshort` with a model whose loss is NaN (or infinite) at one update, on one rank."""

import os

import trainshort.train.loop
from trainshort.cli.main import main
from trainshort.model.transformer import Loss, TransformerLM

forward, accumulate = TransformerLM.forward, trainshort.train.loop._accumulate_gradients
update, rank, value = int(os.environ["NAN_AT"]), os.environ["NAN_RANK"], float(os.environ["NAN_VALUE"])
now = 0


def counted(job, step, *rest):
    global now
    now = step + 1
    return accumulate(job, step, *rest)


def poisoned(self, *arguments, **options):
    result = forward(self, *arguments, **options)
    if self.training and now == update and os.environ.get("RANK", "0") == rank:
        return Loss(result.total * value, result.count)
    return result


trainshort.train.loop._accumulate_gradients = counted
TransformerLM.forward = poisoned
main()
