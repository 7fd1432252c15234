"""The bounded KV cache for models with a decay bias, such as the Forgetting Transformer (FoX).

A `DecayBias` c adds c[i] - c[j] to the score of query i and key j, where c is the cumulative log decay. The bound of
bounded.py then becomes the following, with K, d and lse as defined there:

    mass <= exp(|q| * K / sqrt(d) + c[i] + E - lse)        E = log(sum of exp(-c[j]) over all evicted keys j)

E is a single number per head, which is updated when keys are evicted. The text determines the length of the ring
buffers: memory stays bounded only if the forget gates of the model close.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trainshort.attention import AttentionCall, Bias, DecayBias
from trainshort.errors import InputError
from trainshort.model.cache.bounded import CAPACITY_MARGIN, BoundedLayer
from trainshort.model.cache.ring_buffer import UNBOUNDED
from trainshort.model.positions.base import CUMULATIVE_DECAY_KEY


class BoundedDecayLayer(BoundedLayer):
    """One layer of a `BoundedCache` for a model with a `DecayBias`.

    The cumulative log decay of a token is the sum of the log forget gates of all tokens up to this token.
    """

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """Compute the attention of new tokens, and keep the cumulative log decays of the cached tokens.

        The cumulative log decay of a token is the sum of the log forget gates (FoX) of all tokens so far.

        Args:
            q: The queries of the new tokens.
            k: The keys of the new tokens.
            v: The values of the new tokens.
            options: The other arguments of the attention, such as `bias`.

        Returns:
            The attention output of the new tokens.
        """
        decays = options["bias"].cumulative  # (1, heads, tokens)
        is_start_of_text = self.length == 0
        if is_start_of_text:
            initial_decays = decays[0, :, 0].tolist()
            for state, initial_decay in zip(self.head_states, initial_decays, strict=True):
                state.initial_decay = initial_decay
        out = super()._prefill(q, k, v, options)
        # `_decay_span` is the number of newest tokens whose decays are still needed.
        self.method_cache[CUMULATIVE_DECAY_KEY] = decays[..., -self._decay_span :].clone()
        return out

    @property
    def _decay_span(self) -> int:
        """Return the number of newest tokens whose cumulative log decays are needed: the longest ring buffer."""
        return max((ring_buffer.count for ring_buffer in self.ring_buffers), default=0)

    def _slopes(self, bias: Bias | None, heads: int) -> Float[Tensor, " heads"]:
        """Return a slope of 0 for each head, because a `DecayBias` (forget gates) has no ALiBi slopes.

        Raises:
            InputError: If the bias is not a `DecayBias`.
        """
        if not isinstance(bias, DecayBias | None):
            raise InputError(
                f"A BoundedCache with has_decay_bias=True requires a DecayBias (FoX), got {type(bias).__name__}."
            )
        return torch.zeros(heads)

    def _bias_for_heads(self, bias: Bias, heads: slice, num_keys: int) -> Bias:
        """Return the bias of some query heads for the newest `num_keys` keys."""
        assert isinstance(bias, DecayBias)
        return DecayBias(bias.cumulative[:, heads, -num_keys:])

    def _cumulative_decay(self, head: int, call: AttentionCall) -> Float[Tensor, " keys"]:
        """Return the cumulative log decay (the sum of the log forget gates so far) at each key of the call.

        Args:
            head: The index of the query head among all query heads of the layer.
            call: The attention call of the query heads that share one key-value head.
        """
        assert isinstance(call.bias, DecayBias)
        group_size = call.q.shape[1]  # the number of query heads that share the key-value head
        # `cumulative` has the shape (1, group_size, keys).
        return call.bias.cumulative[0, head % group_size].double()

    def _evicted_mass(
        self, head: int, call: AttentionCall, excess: Float[Tensor, " new"], distance: Int[Tensor, " new"]
    ) -> Float[Tensor, " new"]:
        """Return an upper bound on the softmax mass of the evicted keys, for each new query.

        Args:
            head: The index of the query head.
            call: The attention call of the new tokens.
            excess: For each new query, an upper bound on its scores before the bias, minus its log-sum-exp.
            distance: The distance to the nearest evicted key. Not used, because a `DecayBias` depends on the text.
        """
        # The bias of query i and key j is c[i] - c[j], where c is the cumulative log decay. Therefore
        # mass <= exp(excess + c[i] + E), where E is the logarithm of the sum of exp(-c[j]) over all evicted keys j.
        query_decay = self._cumulative_decay(head, call)[-len(excess) :]
        return torch.exp(excess + query_decay + self.head_states[head].log_evicted_weight)

    def _bias_drop(self, head: int, call: AttentionCall) -> Float[Tensor, " new"]:
        """Return for each new token the difference between its own bias and the bias of the first token of the text.

        The bias of query i and key j is c[i] - c[j], where c is the cumulative log decay. The bias of the new token
        itself is 0, so the difference is c[0] - c[i].

        Args:
            head: The index of the query head.
            call: The attention call of the new tokens.
        """
        num_new = call.q.shape[2]
        new_decays = self._cumulative_decay(head, call)[-num_new:]
        return self.head_states[head].initial_decay - new_decays

    def _required_capacity(self, kv_head: int, call: AttentionCall) -> int:
        """Return the number of keys that the ring buffer of a key-value head must hold.

        The weight of a key is exp(-c), where c is the cumulative log decay at the key. The oldest keys may be evicted
        if the total weight of all evicted keys stays small enough. The limit follows from the tolerance and from the
        query with the largest excess so far, plus `CAPACITY_MARGIN`.

        Args:
            kv_head: The index of the key-value head.
            call: The attention call of the query heads that share this key-value head.
        """
        group_size = call.q.shape[1]
        max_capacity = max(1, (call.window or UNBOUNDED) - 1)
        if self.tolerance == 0:
            return max_capacity

        required = 1
        for head in range(kv_head * group_size, (kv_head + 1) * group_size):
            decays = self._cumulative_decay(head, call)
            state = self.head_states[head]
            # The logarithm of the largest total weight that the evicted keys may have.
            max_log_weight = math.log(self.tolerance) - state.max_excess - CAPACITY_MARGIN - float(decays[-1])
            if not math.isfinite(max_log_weight):
                return max_capacity
            log_evicted_weight = torch.tensor(state.log_evicted_weight, dtype=torch.float64, device=decays.device)
            # For each key, the logarithm of the total weight of this key and all earlier keys.
            log_weight_up_to_key = torch.logaddexp(log_evicted_weight, (-decays).logcumsumexp(0))
            num_evictable = int((log_weight_up_to_key <= max_log_weight).sum())
            required = max(required, len(decays) - num_evictable)

        if required > self.ring_buffers[kv_head].capacity:
            # If the forget gates stay open, every token needs one more slot. With the extra slots, the ring buffer does
            # not grow at every token.
            required += required // 4
        return max(1, min(required, max_capacity))

    def _evict(self, kv_head: int, call: AttentionCall, num_evicted: int) -> None:
        """Update the largest norm and the total weight of all evicted keys, on which the error bound depends.

        The weight of a key is exp(-c), where c is the cumulative log decay at the key.

        Args:
            kv_head: The index of the key-value head.
            call: The attention call of the new tokens. Its keys are the cached keys, followed by the new keys.
            num_evicted: How many of the oldest keys of the call are evicted.
        """
        super()._evict(kv_head, call, num_evicted)
        # Add the weights of the newly evicted keys to the total weight of all evicted keys. All numbers are logarithms.
        group_size = call.q.shape[1]  # the number of query heads that share the key-value head
        for head in range(kv_head * group_size, (kv_head + 1) * group_size):
            state = self.head_states[head]
            log_evicted_weight = torch.tensor([state.log_evicted_weight], dtype=torch.float64, device=call.k.device)
            new_log_weights = -self._cumulative_decay(head, call)[:num_evicted]
            state.log_evicted_weight = float(torch.cat([log_evicted_weight, new_log_weights]).logsumexp(0))

    @property
    def bytes(self) -> int:
        """Return the size of all ring buffers and of the cumulative log decays in bytes."""
        decay_bytes = sum(tensor.nbytes for tensor in self.method_cache.values())
        return super().bytes + decay_bytes
