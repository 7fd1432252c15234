"""The programs that exports are made for, each in three words: log-probabilities, greedy text, tokens of a text."""

import json
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainshort.errors import InputError
from trainshort.evaluate.hugging_face import load_causal
from trainshort.files import read_json, read_object
from trainshort.interop import ctranslate, gguf_file
from trainshort.optional import import_optional, require_package

MEND = "Export the run again."
LOGITS = 1 << 24
"""Numbers of logits that are compared at once; of a longer input the last positions."""
ASKED = 64
"""Positions at which llama.cpp is asked, evenly over an input: its server tells what may follow a prompt, and nothing
of the prompt's own tokens, so that each costs a call."""


class Runtime(ABC):
    """An export in the program it was made for."""

    package: str
    ends = False
    """Whether greedy text may hold the end token; a program that stops at it is told to choose another."""

    @abstractmethod
    def log_probabilities(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Positions of an input, and the log-probabilities of what follows each: (positions,) and (positions,
        vocabulary). All positions, or as many as is reasonable."""

    @abstractmethod
    def greedy(self, tokens: list[int], count: int) -> list[int]: ...

    def encode(self, text: str) -> list[int] | None:
        """The tokens of a text; none for a program that takes tokens alone."""
        return None

    @property
    def version(self) -> str:
        return f"{self.package} {metadata.version(self.package)}"


class Transformers(Runtime):
    package = "transformers"
    ends = True

    def __init__(self, folder: Path, longest: int) -> None:
        require_package("transformers", "Verifying a Hugging Face export", "trainshort[hf]")
        from transformers import AutoTokenizer

        if read_object(folder / "config.json", mend=MEND).get("model_type") == "trainshort":
            import trainshort.hf  # noqa: F401  (registers the class)
        self.model: Any = load_causal(folder, torch.float32).eval()
        if hasattr(self.model.config, "max_seq_len"):
            self.model.config.max_seq_len = max(self.model.config.max_seq_len, longest)
        has = (folder / "tokenizer_config.json").exists()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False) if has else None

    @torch.no_grad()
    def log_probabilities(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        return _last(self.model(torch.tensor([tokens]), use_cache=False).logits[0])

    @torch.no_grad()
    def greedy(self, tokens: list[int], count: int) -> list[int]:
        asked = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        prompt = torch.tensor([tokens])
        made = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), eos_token_id=None, **asked)
        return made[0, len(tokens) :].tolist()

    def encode(self, text: str) -> list[int] | None:
        return None if self.tokenizer is None else self.tokenizer(text, add_special_tokens=False)["input_ids"]


class LlamaCpp(Runtime):
    """llama.cpp by the wheel xllamacpp, asked as a server is: all log-probabilities of the token after a prompt."""

    package = "xllamacpp"
    ends = True

    def __init__(self, folder: Path, longest: int) -> None:
        llama = import_optional("xllamacpp", "Verifying a GGUF export", "trainshort[interop]")
        self.vocabulary = _gguf_vocabulary(folder / gguf_file.FILE)
        asked = llama.CommonParams()
        asked.model.path = str(folder / gguf_file.FILE)
        asked.n_ctx, asked.n_parallel, asked.verbosity, asked.warmup = longest + 64, 1, 0, False
        asked.n_batch = asked.n_ubatch = 512
        asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = torch.get_num_threads()
        asked.cache_type_k = asked.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        self.server = llama.Server(asked)
        self._whole = (self.encode("a") or [0])[0]

    def log_probabilities(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Each prompt is the one before and some tokens more, so that the server reads every token once."""
        count = min(ASKED, len(tokens))
        where = (torch.arange(1, count + 1) * len(tokens) / count).long() - 1  # the last one always
        return where, torch.stack([self._next(tokens[: at + 1]) for at in where.tolist()])

    def _next(self, tokens: list[int]) -> Tensor:
        """The server shows probabilities only beside a token whose text is whole, so that it is made to choose one; the
        probabilities are the model's all the same."""
        asked = {"prompt": tokens, "n_predict": 1, "temperature": 0.0, "n_probs": self.vocabulary}
        answer = self.server.handle_completions({**asked, "cache_prompt": True, "logit_bias": [[self._whole, 1e4]]})
        answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
        shown = (answer.get("choices") or [{}])[0].get("logprobs")
        if not shown:
            raise InputError(f"llama.cpp did not answer with probabilities: {str(answer)[:200]}")
        row = torch.full((self.vocabulary,), -torch.inf)
        for one in shown["content"][0]["top_logprobs"]:
            row[one["id"]] = one["logprob"]
        return row

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """Token by token, each after what the server remembers of those before."""
        made: list[int] = []
        for _ in range(count):
            made.append(int(self._next([*tokens, *made]).argmax()))
        return made

    def encode(self, text: str) -> list[int] | None:
        body = json.dumps({"content": text, "add_special": False, "parse_special": False}).encode()
        address = f"{self.server.listening_address}/tokenize"
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["tokens"]


def _gguf_vocabulary(path: Path) -> int:
    """How many tokens a file has."""
    require_package("gguf", "Verifying a GGUF export", "trainshort[interop]")
    import gguf

    return next(int(tensor.shape[1]) for tensor in gguf.GGUFReader(path).tensors if tensor.name == "token_embd.weight")


def _last(logits: Tensor) -> tuple[Tensor, Tensor]:
    """All positions' log-probabilities, or of a long input the last ones'."""
    first = max(0, len(logits) - max(1, LOGITS // logits.shape[1]))
    return torch.arange(first, len(logits)), logits[first:].float().log_softmax(-1)


class CTranslate2(Runtime):
    package = "ctranslate2"

    def __init__(self, folder: Path, longest: int) -> None:
        require_package("ctranslate2", "Verifying a CTranslate2 export", "trainshort[interop]")
        import ctranslate2

        self.generator = ctranslate2.Generator(str(folder), device="cpu", compute_type="float32")
        self.words = read_json(folder / "vocabulary.json", mend=MEND)
        for length in range(1, longest + 1, ctranslate.GROWTH - 1):
            self.generator.forward_batch([[0] * length])  # its table grows by so much a call, and no more

    def log_probabilities(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        import numpy as np

        return _last(torch.from_numpy(np.array(self.generator.forward_batch([tokens])))[0])

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        prompt = [[self.words[token] for token in tokens]]
        limits = {"max_length": count, "min_length": count, "sampling_topk": 1}
        made = self.generator.generate_batch(prompt, include_prompt_in_result=False, **limits)
        return made[0].sequences_ids[0]


ENGINES: dict[str, Callable[[Path, int], Runtime]] = {
    "hf-mpt": Transformers,
    "hf-bloom": Transformers,
    "hf": Transformers,
    "gguf": LlamaCpp,
    "ctranslate2": CTranslate2,
}


def open_engine(to: str, folder: Path, longest: int) -> Runtime:
    """The program an export was made for; one that is not installed is named."""
    kind: Any = ENGINES[to]
    try:
        return kind(folder, longest)
    except InputError:
        raise
    except Exception as error:  # a damaged export can make its program fail in any way it likes
        first = " ".join(str(error).split())[:160] or type(error).__name__
        raise InputError(f"{kind.package} cannot open {folder} ({first}). {MEND}") from None
