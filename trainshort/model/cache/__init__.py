"""What a model remembers of the tokens it has read. Four ways to remember, one way to ask (`layer(i).attend`):

growing.py   Cache: everything, room by doubling
window.py    WindowCache: the last n tokens, and if wanted the first few (StreamingLLM's sinks)
bounded.py   BoundedCache: per head what can still matter under ALiBi's proven bound, with an error certificate
batch.py     Rows: several sequences of different lengths side by side
"""

from trainshort.model.cache.batched import BatchedCache
from trainshort.model.cache.bounded import BoundedCache, Certificate
from trainshort.model.cache.full import Cache, LayerCache
from trainshort.model.cache.sliding_window import WindowCache

__all__ = ["BatchedCache", "BoundedCache", "Cache", "Certificate", "LayerCache", "WindowCache"]
