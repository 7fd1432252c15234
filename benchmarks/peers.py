"""The implementations of attention that the benchmarks compare.

They are the backends of trainshort, plain attention without positions, and ALiBi in other libraries. Each
implementation is a function of (q, k, v, bias). All implementations except plain attention compute the same output. The
second part of the file compares decoding with Hugging Face's MPT.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from benchmarks import training
from benchmarks.inputs import Inputs
from benchmarks.run import Progress
from benchmarks.suites import ATTENTION_IMPLEMENTATIONS
from trainshort import alibi
from trainshort.attention import AttentionCall, DecayBias, LinearBias, attend
from trainshort.attention.backends.ctypes_call import kernel_unavailable_reason
from trainshort.attention.backends.reference import materialize_bias, visibility_mask
from trainshort.config.registries import backends
from trainshort.generate.streaming import stream
from trainshort.interop.formats.base import map_weights
from trainshort.interop.formats.mpt import MPT
from trainshort.model.transformer import TransformerLM
from trainshort.utils.machine import free_memory, package_version

# PyTorch's attention without positions. All times are compared with this implementation.
PLAIN = "plain"

# The backend `windowed` with the ALiBi slopes as a decay bias. The gradient of the decay bias is computed as well, as
# for FoX and for trained slopes. Stored results call this implementation "clock".
DECAY = "clock"

# Inputs longer than this are measured with slow implementations only if `--backends` names them.
MAX_SLOW_PEER_LENGTH = 8192

# The package of each implementation that needs one.
PACKAGES = {"mpt": "transformers", "x-transformers": "x-transformers"}

# Implementations that store scores or masks of size length x length.
QUADRATIC_MEMORY_IMPLEMENTATIONS = ("written-mask", *PACKAGES)

SLOW_IMPLEMENTATIONS = ("windowed-torch", *QUADRATIC_MEMORY_IMPLEMENTATIONS)

# How many copies of the scores these implementations hold at once, in the forward and the backward pass together. Six
# copies need 12 GB at 8,192 tokens and 8 heads.
SCORE_COPIES = 6

Attend = Callable[[Tensor, Tensor, Tensor, LinearBias | DecayBias], Tensor]
"""An implementation of attention: a function of q, k, v and the bias that returns the output."""


def select_implementations(
    names: tuple[str, ...], inputs: Inputs, progress: Progress, causal: bool = True
) -> list[str]:
    """Return the implementations that can run on some inputs. The reason is printed for all others.

    Args:
        names: The implementations that the user named. An empty tuple selects all that are suitable for the length.
        inputs: The inputs of the attention.
        progress: Where messages are printed.
        causal: Whether the attention is causal.

    Returns:
        The names. Plain attention is always included.
    """
    candidates = []
    for name in ATTENTION_IMPLEMENTATIONS:
        if name == PLAIN or not names or name in names:
            candidates.append(name)
    for name in names:
        if name not in candidates:
            candidates.append(name)  # Another attention backend, for example from a plug-in.

    selected = []
    for name in candidates:
        reason = _unsupported_reason(name, inputs, causal, is_requested=bool(names))
        if reason is None:
            selected.append(name)
        else:
            progress.print_once(f"without {name}: {reason}")
    return selected


def _unsupported_reason(name: str, inputs: Inputs, causal: bool, *, is_requested: bool) -> str | None:
    """Return why an implementation cannot run on some inputs, or None if it can.

    Args:
        name: The implementation.
        inputs: The inputs of the attention.
        causal: Whether the attention is causal.
        is_requested: Whether the user named the implementation with `--backends`. Slow implementations then also run
            on long inputs.
    """
    heads, length = inputs.q.shape[1:3]
    package = PACKAGES.get(name)
    stores_scores = name in QUADRATIC_MEMORY_IMPLEMENTATIONS

    if stores_scores and not causal:
        return "it is causal"
    if package is not None and package_version(package) is None:
        return f"{package} is not installed"
    if name in ("windowed", DECAY):
        reason = kernel_unavailable_reason(False)
        if reason:
            return reason
    if name in SLOW_IMPLEMENTATIONS and not is_requested and length > MAX_SLOW_PEER_LENGTH:
        return f"slow above {MAX_SLOW_PEER_LENGTH:,} tokens; use --backends {name} to measure it"
    if (stores_scores or name == "reference") and not _fits_into_memory(SCORE_COPIES * 4 * heads * length**2):
        return f"its {length:,} x {length:,} scores do not fit into the free memory"
    if isinstance(inputs.bias, DecayBias):
        if name == DECAY:
            return "the inputs already have a decay bias, and windowed uses it"
        if package is not None:
            return "it does not support decay biases"
    elif package is not None and not torch.equal(inputs.bias.slopes, alibi.slopes(heads)):
        return "it supports only the slopes of the ALiBi paper"
    if name not in ATTENTION_IMPLEMENTATIONS:
        return _backend_unsupported_reason(name, inputs, causal)
    return None


def _fits_into_memory(byte_count: int) -> bool:
    """Return whether this number of bytes is free. Return True if the free memory is unknown."""
    free_bytes = free_memory()
    return free_bytes is None or byte_count <= free_bytes


def _backend_unsupported_reason(name: str, inputs: Inputs, causal: bool) -> str | None:
    """Return why an attention backend does not support a call with gradients, or None if it does."""
    q = inputs.q.detach().requires_grad_()
    k = inputs.k.detach().requires_grad_()
    v = inputs.v.detach().requires_grad_()
    call = AttentionCall(q, k, v, inputs.bias, causal=causal)
    return backends.get(name).unsupported_reason(call)


def make_implementation(name: str, inputs: Inputs, tolerance: float, causal: bool = True) -> Attend:
    """Return the attention function of an implementation.

    Args:
        name: The implementation.
        inputs: Inputs of the shape that the function will get.
        tolerance: The softmax mass that backends of trainshort may skip per query.
        causal: Whether the attention is causal.
    """
    heads = inputs.q.shape[1]
    head_width = inputs.q.shape[3]
    match name:
        case "plain":
            return lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        case "written-mask":
            return _attend_with_mask
        case "mpt":
            return _make_mpt_attention(heads, head_width)
        case "x-transformers":
            return _make_x_transformers_attention(heads)
        case "clock":
            return _make_backend_attention("windowed", tolerance, causal)
        case _:
            return _make_backend_attention(name, tolerance, causal)


def _make_backend_attention(backend: str, tolerance: float, causal: bool) -> Attend:
    """Return the attention function of a backend of trainshort."""

    def run(q: Tensor, k: Tensor, v: Tensor, bias: LinearBias | DecayBias) -> Tensor:
        out = attend(q, k, v, bias=bias, backend=backend, tolerance=tolerance, causal=causal)
        assert isinstance(out, Tensor)
        return out

    return run


def _attend_with_mask(q: Tensor, k: Tensor, v: Tensor, bias: LinearBias | DecayBias) -> Tensor:
    """Compute causal attention with PyTorch, with the bias as a mask of shape (length, length) for each head."""
    if isinstance(bias, LinearBias):
        mask = alibi.bias(bias.slopes, q.shape[2], k.shape[2])[None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    call = AttentionCall(q, k, v, bias)
    all_tokens = slice(0, q.shape[2])
    bias_values = materialize_bias(call, all_tokens, all_tokens)
    assert bias_values is not None, "a decay bias always has values"
    is_visible = visibility_mask(call, all_tokens, all_tokens)
    mask = bias_values.to(q.dtype).masked_fill(~is_visible, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _make_mpt_attention(heads: int, head_width: int) -> Attend:
    """Return the attention of Hugging Face's MPT without its projections, so that it uses the given q, k and v."""
    from transformers import MptConfig
    from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

    module = MptAttention(MptConfig(d_model=heads * head_width, n_heads=heads), layer_idx=0)
    module.Wqkv = torch.nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    module.out_proj = torch.nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]

    def run(q: Tensor, k: Tensor, v: Tensor, bias: LinearBias | DecayBias) -> Tensor:
        length = q.shape[2]
        # (batch, heads, length, head_width) -> (batch, length, 3 * heads * head_width)
        qkv = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], dim=-1)
        is_future = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        position_bias = build_mpt_alibi_tensor(heads, length)
        out = module(qkv, position_bias=position_bias, attention_mask=is_future)[0]
        return out.unflatten(-1, (heads, head_width)).transpose(1, 2)

    return run


def _make_x_transformers_attention(heads: int) -> Attend:
    """Return the attention of the library x-transformers with its ALiBi bias."""
    from x_transformers.attend import Attend as AttendModule
    from x_transformers.x_transformers import AlibiPositionalBias

    alibi_bias = AlibiPositionalBias(heads=heads, total_heads=heads)
    module = AttendModule(causal=True, flash=True)

    def run(q: Tensor, k: Tensor, v: Tensor, bias: LinearBias | DecayBias) -> Tensor:
        return module(q, k, v, attn_bias=alibi_bias(q.shape[2], k.shape[2]))[0]

    return run


# ---- decoding with MPT

# The number of tokens that MPT generates per round. MPT copies its cache for every token, so this number is small.
MPT_TOKENS_PER_ROUND = 8

# The number of greedy tokens that are compared after each prompt.
GREEDY_TOKENS = 32

# How many copies of the scores MPT holds at once while it reads a prompt.
PROMPT_SCORE_COPIES = 4


def make_model_pair(model: TransformerLM, max_length: int) -> tuple[Any, TransformerLM]:
    """Return an MPT with random weights, and `model` with the same weights.

    Args:
        model: A model of trainshort. Its weights are replaced by those of the MPT.
        max_length: The largest number of tokens that the MPT must support.
    """
    torch.manual_seed(0)
    mpt = training.make_mpt(model.config, max_length).eval()
    weight_mapping = map_weights(MPT, mpt.config.to_dict(), mpt.state_dict())
    model.load_state_dict({name: weight_mapping.tensor(name) for name in weight_mapping.shapes})
    return mpt, model


def count_same_greedy_tokens(mpt: Any, generate: Callable[[Tensor], list[int]], prompt_length: int) -> int:
    """Count how many greedy tokens of another model equal those of an MPT, until the first difference.

    Args:
        mpt: The MPT.
        generate: Returns `GREEDY_TOKENS` greedy tokens of the other model after a prompt.
        prompt_length: The number of random tokens in the prompt.
    """
    generator = torch.Generator().manual_seed(prompt_length)
    prompt = torch.randint(mpt.config.vocab_size, (1, prompt_length), generator=generator)
    generated_tokens = generate(prompt)
    mpt_tokens = generate_greedy(mpt, prompt)
    same_count = 0
    for token, mpt_token in zip(generated_tokens, mpt_tokens, strict=True):
        if token != mpt_token:
            break
        same_count += 1
    return same_count


def generate_with_bounded_cache(model: TransformerLM, tolerance: float, prompt: Int[Tensor, "1 length"]) -> list[int]:
    """Generate greedy tokens with the bounded cache of trainshort, which evicts keys within the tolerance."""
    token_stream = stream(model, prompt[0], tokens=GREEDY_TOKENS, temperature=0, mode="bounded", tolerance=tolerance)
    return [token.id for token in token_stream]


@torch.inference_mode()
def generate_greedy(model: Any, prompt: Int[Tensor, "1 length"]) -> list[int]:
    """Generate greedy tokens with a model of Hugging Face Transformers."""
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=GREEDY_TOKENS,
        min_new_tokens=GREEDY_TOKENS,
        do_sample=False,
        pad_token_id=0,
        use_cache=True,  # The default of MPT is False. The prompt would be read again for every token.
    )
    return output[0, prompt.shape[1] :].tolist()


def make_mpt_decode_task(mpt: Any, context: int) -> Callable[[], object]:
    """Return a function that decodes `MPT_TOKENS_PER_ROUND` tokens with an MPT, as `generate` would call the model.

    Args:
        mpt: The MPT.
        context: The number of tokens that the cache holds at the start. The cached keys and values are random.
    """
    from transformers import DynamicCache

    config = mpt.config
    cache = DynamicCache()
    token = torch.tensor([[7]])
    cache_shape = (2, 1, config.n_heads, context, config.d_model // config.n_heads)
    with torch.inference_mode():
        for layer_index in range(config.n_layers):
            keys, values = torch.randn(cache_shape)
            cache.update(keys, values, layer_index)

    @torch.inference_mode()
    def decode() -> None:
        for _ in range(MPT_TOKENS_PER_ROUND):
            mpt(token, past_key_values=cache, use_cache=True)

    return decode
