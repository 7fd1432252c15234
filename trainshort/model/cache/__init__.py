"""KV caches: the keys and values of past tokens, so that a model does not process these tokens again.

full.py              Cache: keeps all tokens
sliding_window.py    WindowCache: keeps the most recent tokens and, on request, the first tokens (attention sinks)
bounded.py           BoundedCache: evicts keys with provably little softmax mass, and reports a bound on the error
bounded_decay.py     the same for models with a decay bias (FoX)
batched.py           BatchedCache: several caches of different lengths as one batch
ring_buffer.py       the compiled decode step
"""

from trainshort.model.cache.batched import BatchedCache
from trainshort.model.cache.bounded import BoundedCache, Certificate
from trainshort.model.cache.full import Cache, LayerCache
from trainshort.model.cache.sliding_window import WindowCache

__all__ = ["BatchedCache", "BoundedCache", "Cache", "Certificate", "LayerCache", "WindowCache"]
