"""Text at any length, with a promise about memory and error.

Reading order: settings.py, sampling.py and stopping.py (pure), sample.py (one text), streaming.py (`stream`),
memory.py (modes), state.py (save and resume), session.py and live.py (the terminal).
"""

from trainshort.generate.sample import Token
from trainshort.generate.settings import GenerateConfig
from trainshort.generate.streaming import Stream, stream, stream_batch

__all__ = ["GenerateConfig", "Stream", "Token", "stream", "stream_batch"]
