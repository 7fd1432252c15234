"""The cache grows without limit, copies little, and refuses to be misused."""

import pytest
import torch

from trainshort import Cache, InputError, TransformerLM
from trainshort.cache import LayerCache
from trainshort.presets import presets


def test_appending_returns_everything_so_far():
    cache, k, v = LayerCache(), torch.randn(2, 3, 300, 4), torch.randn(2, 3, 300, 4)
    end = 0
    for size in (1, 70, 1, 100, 128):
        got_k, got_v = cache.append(k[:, :, end : end + size], v[:, :, end : end + size])
        end += size
        assert torch.equal(got_k, k[:, :, :end])
        assert torch.equal(got_v, v[:, :, :end])
    assert cache.length == 300


def test_room_at_most_doubles():
    cache, token = LayerCache(), torch.randn(1, 2, 1, 4)
    moves = set()
    for _ in range(1000):
        k, _ = cache.append(token, token)
        moves.add(k.data_ptr())
    assert cache.bytes <= 2 * 1000 * 2 * 2 * 4 * 4
    assert len(moves) <= 6


def test_a_cache_is_for_one_batch():
    model, cache = TransformerLM(presets.get("tiny")()), Cache()
    with torch.no_grad():
        model(torch.ones(2, 3, dtype=torch.long), cache=cache)
        with pytest.raises(InputError, match="holds 2 sequences, but the input has 1"):
            model(torch.ones(1, 3, dtype=torch.long), cache=cache)


def test_a_cache_is_not_for_training():
    with pytest.raises(InputError, match="cannot be trained through"):
        TransformerLM(presets.get("tiny")())(torch.ones(2, 3, dtype=torch.long), cache=Cache())
