"""A bounded cache for models whose bias is a clock, c_i − c_j (the Forgetting Transformer).

The bound of bounded.py with the geometric series replaced by what it stands for: the keys that a head has forgotten can
have had at most

    mass  ≤  exp(‖q‖·K/√d + c_i + E − lse)          E = log Σ exp(−c_j) over all forgotten keys j

of a query's softmax; E is one number per head, added to as keys are forgotten. Rings are as long as the text makes
them: a ring grows when forgetting its oldest key would break the promise for a query like the farthest-reaching so far.
Readings of the clock are kept for the keys that are kept, so memory is bounded where the gates close. Single tokens go
through ring.c, which moves the clock on itself.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trainshort.attention import AttentionCall, Bias, DecayBias
from trainshort.errors import InputError
from trainshort.model.cache.bounded import CAPACITY_MARGIN, BoundedLayer
from trainshort.model.cache.ring_buffer import CLOCK, UNBOUNDED


class BoundedDecayLayer(BoundedLayer):
    """Rings of one layer under a clock."""

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        clock = options["bias"].cumulative
        if not self.length:
            for head, first in zip(self.heads, clock[0, :, 0].tolist(), strict=True):
                head.began = first
        out = super()._prefill(q, k, v, options)
        self.place[CLOCK] = clock[..., -self._decay_span :].clone()
        return out

    @property
    def _decay_span(self) -> int:
        return max((ring.count for ring in self.rings), default=0)

    def _slopes(self, bias: Bias | None, heads: int) -> Float[Tensor, " heads"]:
        if not isinstance(bias, DecayBias | None):
            raise InputError("this bounded cache is for models whose bias is a clock (FoX).")
        return torch.zeros(heads)

    def _bias_of(self, bias: Bias, heads: slice, keys: int) -> Bias:
        assert isinstance(bias, DecayBias)
        return DecayBias(bias.cumulative[:, heads, -keys:])

    def _clock(self, number: int, call: AttentionCall) -> Float[Tensor, " keys"]:
        assert isinstance(call.bias, DecayBias)
        return call.bias.cumulative[0, number % call.q.shape[1]].double()

    def _evicted_mass(
        self, number: int, call: AttentionCall, excess: Float[Tensor, " new"], distance: Int[Tensor, " new"]
    ) -> Float[Tensor, " new"]:
        return torch.exp(excess + self._clock(number, call)[-len(excess) :] + self.heads[number].weight)

    def _bias_drop(self, number: int, call: AttentionCall) -> Float[Tensor, " new"]:
        return self.heads[number].began - self._clock(number, call)[-call.q.shape[2] :]

    def _required_capacity(self, index: int, call: AttentionCall) -> int:
        """Keys to keep so that a query like the farthest-reaching so far, with a margin, loses no more than promised; a
        quarter more where a ring must grow, since gates that stay open ask for one more key with every token."""
        group, most = call.q.shape[1], 1
        limit = (call.window or UNBOUNDED) - 1
        for number in range(index * group, (index + 1) * group):
            clock, excess = self._clock(number, call), self.heads[number].excess
            room = (
                math.log(self.tolerance) - excess - CAPACITY_MARGIN - float(clock[-1])
                if self.tolerance > 0
                else -math.inf
            )
            if not math.isfinite(room):
                return max(1, min(UNBOUNDED, limit))
            known = torch.tensor(self.heads[number].weight, dtype=torch.float64, device=clock.device)
            before = torch.logaddexp(known, (-clock).logcumsumexp(0))
            most = max(most, len(clock) - int((before <= room).sum()))
        if most > self.rings[index].capacity:
            most += most // 4
        return max(1, min(most, limit))

    def _evict(self, index: int, call: AttentionCall, gone: int) -> None:
        super()._evict(index, call, gone)
        group = call.q.shape[1]
        for number in range(index * group, (index + 1) * group):
            head = self.heads[number]
            known = torch.tensor([head.weight], dtype=torch.float64, device=call.k.device)
            head.weight = float(torch.cat([known, -self._clock(number, call)[:gone]]).logsumexp(0))

    @property
    def bytes(self) -> int:
        return super().bytes + sum(x.nbytes for x in self.place.values())
