"""The full KV cache: it stores the keys and values of all tokens, so that no token is processed twice.

Example:
    cache = Cache()
    model(prompt, cache=cache)          # Process the prompt, in one or several chunks.
    model(next_token, cache=cache)      # Process one more token.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trainshort.attention import AttentionCall, Bias, attend_in_blocks, run_attention
from trainshort.errors import InputError
from trainshort.model.cache.ring_buffer import LANES, DecayBuffer, DecodeArgs, RingBuffer, make_head_structs

INITIAL_CAPACITY = 64
"""The number of tokens that the storage of a new cache has room for."""

ContentBiasFunction = Callable[[slice, int, dict[str, Tensor]], Bias | None]
"""A function that computes the bias of a position method whose bias depends on the text.

The arguments are the rows of the batch, the number of cached tokens, and the `method_cache` of the layer.
"""


class LayerCache:
    """The keys and values of one layer.

    Attributes:
        length: The number of tokens that the layer has processed.
        method_cache: Tensors that the position method stores in the cache (see `LayerInput.method_cache`).
        max_skipped_mass: An upper bound on the softmax mass that an attention backend skipped for any query. None if no
            backend reported a bound yet.
    """

    def __init__(self) -> None:
        self.length: int = 0
        self.method_cache: dict[str, Tensor] = {}
        self.max_skipped_mass: Float[Tensor, ""] | None = None
        # Keys (index 0) and values (index 1): (2, batch, kv_heads, capacity, dim). Only `length` columns are filled.
        self._storage = torch.empty(2, 0, 0, 0, 0)
        # Both are created when the compiled decoder processes the first token.
        self._decode_args: DecodeArgs | None = None
        self._decay_buffer: DecayBuffer | None = None

    def attend(
        self,
        q: Float[Tensor, "batch heads new dim"],
        k: Float[Tensor, "batch kv_heads new dim"],
        v: Float[Tensor, "batch kv_heads new dim"],
        *,
        blocks: int | None = None,
        **options: Any,
    ) -> Float[Tensor, "batch heads new dim"]:
        """Store the keys and values of new tokens, and compute the attention of the new tokens to all tokens so far.

        Args:
            q: The queries of the new tokens.
            k: The keys of the new tokens.
            v: The values of the new tokens.
            blocks: The block size for blockwise causal attention (see `attend_in_blocks`). None for normal attention.
            options: Further arguments of `attend`, such as `bias` and `window`.

        Returns:
            The attention output of the new tokens.
        """
        k, v = detach_kv(k, v)
        all_k, all_v = self.append(k, v)
        if blocks is not None:
            return attend_in_blocks(q, all_k, all_v, blocks=blocks, **options)

        backend = options.pop("backend", "auto")
        result = run_attention(AttentionCall(q, all_k, all_v, **options), backend)
        if result.certificate is not None:
            # The certificate is an upper bound on the skipped softmax mass, for each batch entry and head.
            skipped_mass = result.certificate.max()
            if self.max_skipped_mass is None:
                self.max_skipped_mass = skipped_mass
            else:
                self.max_skipped_mass = torch.maximum(self.max_skipped_mass, skipped_mass)
        return result.out

    def content_bias(self, compute_bias: ContentBiasFunction, rows: slice = slice(None)) -> Any:
        """Return the attention bias of a position method whose bias depends on the text.

        Args:
            compute_bias: The function that computes the bias. Its arguments are the rows, the number of tokens in the
                cache, and the tensors that the position method keeps between two calls.
            rows: The rows of the input batch that this cache stores.

        Returns:
            A value for the argument `bias` of `attend`.
        """
        return compute_bias(rows, self.length, self.method_cache)

    def append(
        self, k: Float[Tensor, "batch kv_heads new dim"], v: Float[Tensor, "batch kv_heads new dim"]
    ) -> tuple[Float[Tensor, "batch kv_heads length dim"], Float[Tensor, "batch kv_heads length dim"]]:
        """Store the keys and values of new tokens.

        Returns:
            The keys and the values of all tokens so far. Both are views of the storage, not copies.

        Raises:
            InputError: If the batch size differs from that of earlier calls.
        """
        stored_batch = self._storage.shape[1]  # 0 before the first call
        if stored_batch not in (0, k.shape[0]):
            raise InputError(
                f"Expected a batch of {stored_batch} sequences, as in the cache, got {k.shape[0]}. "
                "Use a new Cache for another batch."
            )
        end = self.length + k.shape[2]
        storage = self._storage
        if end > storage.shape[3]:
            storage = self._reserve(end, k)
        storage[0, :, :, self.length : end] = k
        storage[1, :, :, self.length : end] = v
        self.length = end
        return storage[0, :, :, :end], storage[1, :, :, :end]

    def decode_args(
        self, slopes: Float[Tensor, " heads"], kv_shape: tuple[int, int], window: int | None
    ) -> DecodeArgs | None:
        """Return the arguments with which the compiled decoder processes one more token.

        After the compiled decoder has processed the token, the caller must call `commit_token`.

        Args:
            slopes: The ALiBi slopes, one per query head.
            kv_shape: The number of key-value heads and the size of each head.
            window: The size of the sliding window, or None.

        Returns:
            The arguments, or None if the cache cannot be used by the compiled decoder. Use `attend` in this case.
        """
        kv_heads, dim = kv_shape
        empty_kv = torch.empty(1, kv_heads, 0, dim, dtype=torch.float32)
        # The storage of a new cache has no batch size, dtype and device yet. They will be those of `empty_kv`.
        is_new = self._storage.shape[1] == 0
        storage = empty_kv[None] if is_new else self._storage

        # The compiled code reads complete vector registers, so the head size must be a multiple of LANES.
        has_supported_dim = dim % LANES == 0
        is_single_sequence = storage.shape[1] == 1
        has_supported_type = storage.dtype == empty_kv.dtype and storage.device == empty_kv.device
        if not has_supported_dim or not is_single_sequence or not has_supported_type:
            return None

        if self.length == storage.shape[3]:
            storage = self._reserve(self.length + 1, empty_kv)
        if self._decode_args is None:
            ring_buffers = (RingBuffer * kv_heads)()
            heads = make_head_structs(slopes.tolist(), max_excess=0.0)
            self._decode_args = DecodeArgs.create(ring_buffers, heads, dim)
        self._decode_args.bind_full_cache(storage, self.length)
        self._decode_args.set_step(self.length, window)
        return self._decode_args

    def commit_token(self, k: Float[Tensor, "1 kv_heads 1 dim"], v: Float[Tensor, "1 kv_heads 1 dim"]) -> None:
        """Count a token that the compiled decoder has processed.

        Args:
            k: The key of the token. Not used here, because the compiled decoder has already stored the key.
            v: The value of the token. Not used here either.
        """
        self.length += 1
        if self._decay_buffer is not None:
            self._decay_buffer.commit_token(self.method_cache, self._decay_span)

    def set_decay(self, args: DecodeArgs, gates: Float[Tensor, " heads"], gate_sign: float) -> None:
        """Set the arguments of a decode step such that it uses forget gates (FoX) instead of ALiBi slopes.

        The cumulative log decay of a token is the sum of the log forget gates of all tokens so far. The step computes
        log(sigmoid(gate_sign * gate)) for each head, and adds the result to the cumulative log decay of the head.

        Args:
            args: The arguments of the decode step.
            gates: The tensor into which the compiled decoder writes the gates of the new token.
            gate_sign: 1, or -1 if the gates are negated.
        """
        if self._decay_buffer is None:
            self._decay_buffer = DecayBuffer()
        self._decay_buffer.bind(args, self.method_cache)
        args.gates = gates.data_ptr()
        args.gate_sign = gate_sign

    @property
    def _decay_span(self) -> int:
        """Return the number of newest tokens whose cumulative log decays (sums of log gates) are still needed."""
        return self.length

    def _reserve(self, length: int, like: Float[Tensor, "batch kv_heads _ dim"]) -> Tensor:
        """Allocate larger storage, and copy the stored keys and values.

        The capacity at least doubles, so that appending n tokens one by one copies O(n) tokens in total.

        Args:
            length: The number of tokens that the new storage must have room for.
            like: A tensor whose batch size, number of heads, head size, dtype and device are those of the keys.

        Returns:
            The new storage.
        """
        batch, kv_heads, _, dim = like.shape
        capacity = max(length, 2 * self._storage.shape[3], INITIAL_CAPACITY)
        new_storage = like.new_empty(2, batch, kv_heads, capacity, dim)
        if self.length:
            new_storage[:, :, :, : self.length] = self._storage[:, :, :, : self.length]
        self._storage = new_storage
        return new_storage

    @property
    def bytes(self) -> int:
        """Return the size of the stored tensors in bytes."""
        return self._storage.nbytes


@dataclass
class Cache:
    """A KV cache that keeps all tokens. Other caches derive from this class.

    A new cache is empty. The model creates the layers when it uses the cache for the first time.
    """

    layers: list[LayerCache] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Return the number of tokens that the model has processed with this cache."""
        return self.layers[0].length if self.layers else 0

    def offset(self, batch: int) -> int | Int[Tensor, "batch 1"]:
        """Return the position of the next token.

        Args:
            batch: The number of sequences in the input. Only `BatchedCache` uses this argument.

        Returns:
            One number for all sequences, or a tensor if the sequences have different lengths (`BatchedCache`).
        """
        return self.length

    @property
    def bytes(self) -> int:
        """Return the size of all stored tensors in bytes."""
        return sum(layer.bytes for layer in self.layers)

    def layer(self, index: int) -> LayerCache:
        """Return the cache of one transformer layer, and create it if it does not exist yet."""
        while len(self.layers) <= index:
            self.layers.append(self.new_layer())
        return self.layers[index]

    def new_layer(self) -> LayerCache:
        """Create the empty cache of one layer. Subclasses return their own class."""
        return LayerCache()


def detach_kv(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return `k` and `v`, after a check that autograd does not record them. A cache cannot be used for training.

    Raises:
        InputError: If autograd is enabled and `k` or `v` requires a gradient.
    """
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise InputError("A cache does not support gradients. Wrap the call in torch.no_grad().")
    return k, v
