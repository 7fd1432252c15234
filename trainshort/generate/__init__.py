"""Generate text with a trained model, at any length and, for ALiBi models, in bounded memory."""
