"""Train a language model, write checkpoints and continue a run that was stopped."""
