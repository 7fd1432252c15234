"""Our models as Hugging Face models: every way in which transformers calls one gives what ours gives."""

import subprocess
import sys

import pytest
import torch
from random_runs import make_run

transformers = pytest.importorskip("transformers")

import trainshort.hf  # noqa: E402
from trainshort import InputError  # noqa: E402
from trainshort.interop.export import export  # noqa: E402
from trainshort.model.positions import positions  # noqa: E402
from trainshort.train.checkpoint import load_model  # noqa: E402

KINDS = {name: {"position": name} for name in positions.names()} | {
    "adaptive": {"adaptive": {"cutoffs": (50, 120), "factor": 2}},
    "rotary with key heads": {"position": "rotary", "kv_heads": 2},
    "fox with key heads and plain ones": {"position": "fox", "kv_heads": 2, "nope_heads": 2},
    "learned slopes": {"position_settings": {"learned_slopes": True}},
    "learned": {"position": "learned", "position_settings": {"max_length": 80}},
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def pair(request, tmp_path):
    run = make_run(tmp_path / "run", **request.param)
    export(run, "hf", tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    return load_model(run), theirs, tmp_path / "out"


def test_saved_and_loaded_it_is_equal_to_the_bit(pair, tmp_path):
    ours, theirs, _ = pair
    tokens = torch.randint(256, (2, 70))
    theirs.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        expected = ours(tokens)
        assert torch.equal(theirs(tokens, use_cache=False).logits, expected)
        assert torch.equal(again(tokens, use_cache=False).logits, expected)
        last = theirs(tokens, use_cache=False, logits_to_keep=3).logits
        torch.testing.assert_close(last, expected[:, -3:], rtol=0, atol=1e-5)
        loss = theirs(tokens, labels=tokens, use_cache=False).loss
    torch.testing.assert_close(loss, ours.loss(tokens[:, :-1], tokens[:, 1:]).total / 138, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_with_padding_and_caches(pair, cache):
    ours, theirs, _ = pair
    prompts = [torch.randint(1, 256, (size,)) for size in (40, 25)]
    padded, mask = torch.zeros(2, 40, dtype=torch.long), torch.zeros(2, 40, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        padded[row, -len(prompt) :], mask[row, -len(prompt) :] = prompt, 1
    asked = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    kind = {"cache_implementation": "static"} if cache == "static" else {}
    made = theirs.generate(padded, attention_mask=mask, **asked, **kind)
    for row, prompt in enumerate(prompts):
        expected = [t.id for t in trainshort.stream(ours, prompt, tokens=12, temperature=0, stop_at_end=False)]
        assert made[row, 40:].tolist() == expected
    beams = theirs.generate(padded[:1], num_beams=3, **asked)
    assert torch.equal(beams, theirs.generate(padded[:1], num_beams=3, use_cache=False, **asked))


def test_chunks_and_packed_documents(pair):
    ours, theirs, _ = pair
    tokens = torch.randint(256, (1, 60))
    with torch.no_grad():
        whole = ours(tokens)
        first = theirs(tokens[:, :35], use_cache=True)
        second = theirs(tokens[:, 35:], past_key_values=first.past_key_values, use_cache=True)
        torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole, rtol=0, atol=1e-5)
        where = torch.cat([torch.arange(25), torch.arange(35)])[None]
        for asked in ({}, {"use_cache": False}, {"attention_mask": torch.ones_like(tokens)}):
            packed = theirs(tokens, position_ids=where, **asked)
            torch.testing.assert_close(packed.logits[:, 25:], ours(tokens[:, 25:]), rtol=0, atol=1e-5)
            assert packed.past_key_values is None
        with pytest.raises(InputError, match=r"^Packed documents cannot be combined with a cache\."):
            theirs(tokens, position_ids=where, past_key_values=transformers.DynamicCache())


def test_padding_on_either_side(pair):
    """Also between packed documents, and with the cache that a model makes when it is not asked."""
    ours, theirs, _ = pair
    tokens = torch.randint(256, (1, 40))
    for first, last in ((9, 0), (0, 9), (4, 5)):
        mask = torch.nn.functional.pad(torch.ones_like(tokens), (first, last))
        padded = torch.nn.functional.pad(tokens, (first, last))
        for asked in ({}, {"use_cache": False}, {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}):
            with torch.no_grad():
                found = theirs(padded, attention_mask=mask, **asked).logits[:, first : first + 40]
            torch.testing.assert_close(found, ours(tokens), rtol=0, atol=1e-5)


def test_gradients_do_not_depend_on_the_mode(pair):
    """Without dropout a model in eval mode, which makes a cache, has the gradients of one in training."""
    _, theirs, _ = pair
    tokens, made = torch.randint(256, (2, 30)), []
    for mode in (theirs.train, theirs.eval):
        mode()
        theirs.zero_grad()
        theirs(tokens, labels=tokens).loss.backward()
        made.append([weight.grad for weight in theirs.parameters()])
    torch.testing.assert_close(made[1], made[0])


def test_half_precision_keeps_the_slopes(tmp_path):
    export(make_run(tmp_path / "run"), "hf", tmp_path / "out")
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert half.model.position.slopes.dtype == torch.float32
    assert half.model.position.slopes.tolist() == [2**-2, 2**-4, 2**-6, 2**-8]


def test_without_import_it_asks_for_trust(tmp_path):
    """A folder can be loaded by who knows nothing of us, if they say that they trust it."""
    export(make_run(tmp_path / "run"), "hf", tmp_path / "out")
    script = f"""
import transformers
transformers.logging.set_verbosity_error()
model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path / "out")!r}, trust_remote_code=True)
print(type(model).__name__)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "TrainshortForCausalLM", done.stderr


def test_training_and_refusals(pair):
    _, theirs, _ = pair
    theirs.train()
    tokens = torch.randint(256, (2, 30))
    theirs(tokens, labels=tokens).loss.backward()
    assert all(weight.grad is not None for weight in theirs.parameters())
    with pytest.raises(InputError, match="vocabulary of a trained model is fixed"):
        theirs.resize_token_embeddings(300)


def test_pipeline_tokenizer_and_trainer(tmp_path):
    """Each of transformers' own ways to use a model, from the exported folder."""
    export(make_run(tmp_path / "run"), "hf", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "The state of the Union, naïve <|endoftext|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt = torch.tensor(tokenizer(text)["input_ids"])
    expected = [t.id for t in trainshort.stream(load_model(tmp_path / "run"), prompt, tokens=9, temperature=0)]
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    asked = {"max_new_tokens": 9, "do_sample": False, "return_tensors": True, "pad_token_id": 0, "eos_token_id": None}
    made = pipe(text, **asked)[0]["generated_token_ids"]
    assert list(made)[len(prompt) :] == expected

    rows = [{"input_ids": row, "labels": row} for row in torch.randint(256, (1, 24)).repeat(16, 1)]
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path / "trainer"), max_steps=8, per_device_train_batch_size=4, learning_rate=1e-2,
        report_to=[], logging_steps=1, use_cpu=True, save_steps=8,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < 0.7 * losses[0]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trainer" / "checkpoint-8")
    assert torch.equal(again.model.final_norm.weight, model.model.final_norm.weight)
