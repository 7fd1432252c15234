"""Text generation with trained models: any length and, for models with ALiBi or FoX, bounded memory."""
