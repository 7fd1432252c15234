"""Saved states: they continue bit by bit, belong to one model, and survive whatever stops the next save."""

import contextlib
import json
import math
import os
import random
import signal
from functools import reduce

import pytest
import torch
from safetensors.torch import save_file
from test_streaming import make_model

import trainshort
from trainshort import InputError
from trainshort.cache.ring import unavailable
from trainshort.checkpoint import sha256_of
from trainshort.cli import main
from trainshort.data.tokenizer.built import ByteTokenizer
from trainshort.generate import GenerateConfig, TokenStream, state, stream_batch
from trainshort.generate.session import Session
from trainshort.generate.state import load_state, save_state

MODES = [{}, {"mode": "bounded"}, {"mode": "window", "window": 32}, {"mode": "window", "window": 32, "sinks": 4}]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_resume_equals_never_stopped(tmp_path, mode):
    model, tokenizer = make_model(), ByteTokenizer()
    settings = {"tokenizer": tokenizer, "tokens": 160, "stop_at_end": False, "repetition_penalty": 1.2, "top_p": 0.9}
    made = trainshort.stream(model, "once " * 20, **settings, **mode, stop=("\x01\x02\x03\x04",))
    for _ in range(70):
        next(made)
    save_state(made, tmp_path / "state")
    rest = list(made)
    resumed = load_state(tmp_path / "state", model, tokenizer)
    assert list(resumed) == rest
    assert resumed.certificate == made.certificate
    assert [sample.finished for sample in resumed.samples] == ["length"]


def test_a_batch_resumes_between_two_samples_of_one_step(tmp_path):
    model = make_model()
    made = stream_batch(model, [[1, 2], [3]], tokens=10)
    for _ in range(7):
        next(made)
    save_state(made, tmp_path / "state")
    assert list(load_state(tmp_path / "state", model)) == list(made)


def test_settings_may_change_but_not_those_of_the_cache(tmp_path):
    model = make_model()
    made = trainshort.stream(model, [1, 2, 3], tokens=4, mode="bounded")
    list(made)
    save_state(made, tmp_path / "state")
    assert load_state(tmp_path / "state", model, temperature=0.0).config.temperature == 0
    with pytest.raises(InputError, match=r"saved with tolerance 1e-06, and what it forgot cannot come back"):
        load_state(tmp_path / "state", model, tolerance=1e-3)
    with pytest.raises(InputError, match="saved with mode bounded"):
        load_state(tmp_path / "state", model, mode="full")


def test_another_model_and_every_kind_of_damage_are_refused(tmp_path):
    model, path = make_model(), tmp_path / "state"
    made = trainshort.stream(model, [1, 2, 3], tokens=4)
    list(made)
    save_state(made, path)
    whole = path.read_bytes()
    other = make_model()
    with torch.no_grad():
        other.final_norm.weight[0] += 1e-3  # pyright: ignore[reportIndexIssue]
    with pytest.raises(InputError, match="another model or other weights"):
        load_state(path, other)
    with pytest.raises(InputError, match="no saved state"):
        load_state(tmp_path / "nowhere", model)
    for cut in (0, 7, 200, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(InputError, match="no state file, or was cut short"):
            load_state(path, model)
    for place in (len(whole) - 3, len(whole) // 2, whole.index(b'made\\": ') + 8):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(bytes(changed))
        with pytest.raises(InputError, match=r"damaged|cut short"):
            load_state(path, model)
    path.write_bytes(whole)
    assert load_state(path, model).context == made.context


def test_a_failed_save_leaves_the_state_before_it(tmp_path):
    model, path = make_model(), tmp_path / "state"
    made = trainshort.stream(model, [1, 2, 3], tokens=8)
    next(made)
    save_state(made, path)
    before = path.read_bytes()
    with pytest.raises(InputError, match="Cannot write"):
        save_state(made, tmp_path / "missing" / "state")
    made.torn = True  # as an interrupt in the middle of a token leaves it
    with pytest.raises(InputError, match="stopped in the middle of a token"):
        save_state(made, path)
    with pytest.raises(InputError, match="resume it from its last saved state"):
        next(made)
    assert path.read_bytes() == before


def interrupt_in_the_second_layer(made, times):
    layer = made.caches[0].layers[1]
    door = "next_call" if unavailable() is None else "attend"  # a token's way through a layer, compiled or not
    go_through = getattr(layer, door)

    def interrupted(*arguments, **options):
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        return go_through(*arguments, **options)

    setattr(layer, door, interrupted)
    return door


def test_an_interrupt_waits_for_the_end_of_the_token(tmp_path):
    """Ctrl-C comes inside the second layer; the token is finished first, and going on equals never interrupted."""
    model = make_model()
    expected = [token.id for token in trainshort.stream(model, [1, 2, 3], tokens=10)]
    made = trainshort.stream(model, [1, 2, 3], tokens=10)
    ids = [next(made).id for _ in range(3)]
    door = interrupt_in_the_second_layer(made, 1)
    with pytest.raises(KeyboardInterrupt):
        next(made)
    delattr(made.caches[0].layers[1], door)
    assert not made.torn
    save_state(made, tmp_path / "state")
    for going_on in (load_state(tmp_path / "state", model), made):
        assert ids + [token.id for token in going_on] == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_token_that_waited_is_among_those_asked_for(tmp_path):
    """An interrupt leaves the token at hand made but not shown; going on by 5 shows 5 with it."""
    made = trainshort.stream(make_model(), [1, 2, 3], tokens=10)
    next(made)
    interrupt_in_the_second_layer(made, 1)
    with pytest.raises(KeyboardInterrupt):
        next(made)
    assert len(made.waiting) == 1
    save_state(made, tmp_path / "state")
    for tokens in (5, 1):
        resumed = load_state(tmp_path / "state", made.model, tokens=tokens)
        resumed.go_on()
        assert len(list(resumed)) == tokens
        fed = load_state(tmp_path / "state", made.model, tokens=5)
        fed.feed([7, 8])
        assert len(list(fed)) == 5


def test_nothing_read_cannot_go_on(tmp_path):
    made = TokenStream(make_model(), GenerateConfig())
    made.begin()
    save_state(made, tmp_path / "state")
    resumed = load_state(tmp_path / "state", made.model)
    with pytest.raises(InputError, match="the prompt is empty"):
        resumed.go_on()
    resumed.feed([1])
    assert len(list(resumed)) == 256


def test_a_second_interrupt_comes_through_and_is_remembered():
    model = make_model()
    made = trainshort.stream(model, [1, 2, 3], tokens=10)
    next(made)
    interrupt_in_the_second_layer(made, 2)
    with pytest.raises(KeyboardInterrupt):
        next(made)
    assert made.torn


def test_a_broken_token_is_one_sentence_and_the_saved_state_stays(tmp_path, capsys, monkeypatch):
    """Ctrl-C twice within one token, at the command: exit code 2, and what was saved before is untouched."""
    model, path = make_model(), tmp_path / "state"
    made = trainshort.stream(model, [1, 2, 3], tokens=10, tokenizer=ByteTokenizer())
    next(made)
    save_state(made, path)
    before, context = path.read_bytes(), made.context
    interrupt_in_the_second_layer(made, 2)
    monkeypatch.setattr("trainshort.cli.run", lambda argv: Session(made, save_to=path).run())
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert f"trainshort: stopped in the middle of a token. {path} is as it was saved last." in capsys.readouterr().err
    assert path.read_bytes() == before
    assert load_state(path, model, ByteTokenizer()).context == context


@pytest.mark.parametrize("length", [64, 71, 127, 130])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_resumed_numbers_are_the_same_bits_wherever_the_cache_lay(tmp_path, mode, length):
    """Also without compiled code: torch's products round by where a row lies in memory."""
    model = make_model()
    made = trainshort.stream(model, list(range(length)), tokens=40, chunk=50, **mode)
    next(made)
    save_state(made, tmp_path / "state")
    resumed = load_state(tmp_path / "state", model)
    assert list(resumed) == list(made)


def forge(path, values=None, tensors=None):
    """The state with other numbers or tensors, and a sha256 that is right."""
    text, stored = state._read(path)
    text = text if values is None else json.dumps(values)
    stored = stored if tensors is None else tensors
    save_file(stored, path, metadata={"state": text, "sha256": sha256_of(stored, text.encode())})


def numbers(values, place=()):
    """Where the numbers stand in nested plain data."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(value, dict | list):
            yield from numbers(value, (*place, key))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*place, key)


STRANGE = [-1, 0, 1, 5, 10**8, 2**53, 2**63, 2**80, 0.5, math.nan, -math.inf, "7", [], {}]
SIZES = {"length", "capacity", "count", "next", "dim", "begin"}


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_no_number_of_a_state_is_believed_before_it_fits_the_tensors(tmp_path, mode):
    """Every size with a few strange values, and a hundred draws from all numbers with all of them."""
    model, path = make_model(max_bias=6.0, kv_heads=2), tmp_path / "state"
    made = trainshort.stream(model, list(range(90)), tokens=3, **mode)
    next(made)
    save_state(made, path)
    values = json.loads(state._read(path)[0])
    places = list(numbers({"samples": values["samples"], "waiting": values["waiting"]}))
    tries = [(place, huge) for place in places if place[-1] in SIZES for huge in (-1, 10**8, 2**53)]
    tries += random.Random(1).sample([(place, strange) for place in places for strange in STRANGE], 100)
    for place, strange in tries:
        changed = json.loads(json.dumps(values))
        reduce(lambda inner, key: inner[key], place[:-1], changed)[place[-1]] = strange
        forge(path, changed)
        if place[-1] in SIZES and not (isinstance(strange, int) and 0 <= strange <= 5):
            with pytest.raises(InputError, match="cannot be resumed: "):
                load_state(path, model)
        else:
            with contextlib.suppress(InputError):
                list(load_state(path, model))  # what is taken must be safe to go on with


def test_a_length_that_all_layers_agree_on_is_not_believed_either(tmp_path):
    """Of a bounded cache, which could have forgotten all that is not there; but its rings never came round."""
    model, path = make_model(max_bias=6.0), tmp_path / "state"
    made = trainshort.stream(model, list(range(90)), tokens=3, mode="bounded")
    next(made)
    save_state(made, path)
    values = json.loads(state._read(path)[0])
    for layer in values["samples"][0]["layers"]:
        layer["length"] = 10**8
    forge(path, values)
    with pytest.raises(InputError, match="cannot be resumed: the length of a layer does not fit"):
        load_state(path, model)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_no_tensor_of_a_state_is_believed_before_it_fits_the_model(tmp_path, mode):
    model, path = make_model(), tmp_path / "state"
    made = trainshort.stream(model, list(range(90)), tokens=3, repetition_penalty=1.1, **mode)
    next(made)
    save_state(made, path)
    whole = state._read(path)[1]
    for name, tensor in whole.items():
        changes = [tensor[..., :-1].contiguous(), tensor[:1].contiguous(), tensor.double(), tensor.flatten()[:0]]
        for change in [*changes[: 3 if tensor.dim() == 1 else 4], None]:
            forge(
                path,
                tensors={
                    **{n: x for n, x in whole.items() if n != name},
                    **({name: change} if change is not None else {}),
                },
            )
            if name == "0.seen" and change is None:
                continue  # a penalty that was switched on at resume begins with nothing seen
            with pytest.raises(InputError, match="cannot be resumed"):
                load_state(path, model)
