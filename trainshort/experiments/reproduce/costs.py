"""What is made beside training and evaluating: Table 1's speeds and memories, and the demo's texts and reach of heads.

Speeds are taken in rounds, one step of each configuration after the other, so that whatever else the machine does
falls on all of them alike, and two of them are compared round by round. Memory is the peak above what the program had
before the model was built, each configuration in a process of its own, since a process does not forget what it once
held; it is taken several times, since peaks differ a little, and several processes run side by side, since they may.
"""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from trainshort.config.run_config import RunConfig
from trainshort.evaluate.analyses.base import AnalysisContext, analyze
from trainshort.evaluate.step_cost import StepBenchmark
from trainshort.evaluate.targets import RunTarget
from trainshort.evaluate.text import open_text
from trainshort.experiments.claims.collection import COST_FORMAT, SAMPLE_FORMAT, read_costs
from trainshort.experiments.reproduce.local import available_cores
from trainshort.generate.streaming import stream
from trainshort.train.run_data import open_run_data
from trainshort.utils.io import make_folder, write_with_checksum
from trainshort.utils.machine import collect_provenance, pick_device
from trainshort.utils.terminal import new_console
from trainshort.utils.timing import Timing, run_in_subprocess, time_interleaved

INTERLEAVE_MAX_LENGTH = 1024
"""Configurations of up to so many tokens a sequence take turns with each other; longer ones with those of their length,
or a single long step would fill a round."""
TIMING_BUDGET_SECONDS = 12.0
MIN_ROUNDS, MOST = 9, 41
"""Rounds: as many as fit into the seconds. With 9 a median is between the second and the eighth, 96 times in 100."""
MEMORY_MEASUREMENTS = 2


def measure_costs(
    configs: dict[str, RunConfig],
    path: Path,
    weighed: Collection[str] | None = None,
    read: Collection[str] | None = None,
) -> None:
    """Measure all, if `path` does not hold all yet: only what took turns with each other can be compared. Memory only
    of those in `weighed`, speed of reading only of those in `read`; None: of all."""
    entries = read_costs(path.parent)
    if not configs.keys() - entries.keys():
        return
    origin, device = collect_provenance(threads=torch.get_num_threads()), pick_device(None)
    groups: dict[int, dict[str, RunConfig]] = {}
    for name, config in configs.items():
        length = config.train.length
        groups.setdefault(INTERLEAVE_MAX_LENGTH if length <= INTERLEAVE_MAX_LENGTH else length, {})[name] = config
    memories = _memories({name: one for name, one in configs.items() if weighed is None or name in weighed}, device)
    for length, group in sorted(groups.items()):
        rigs = {name: StepBenchmark(config, device) for name, config in group.items()}
        timings = _time_interleaved(rigs, [name for name in rigs if read is None or name in read])
        for name, config in group.items():
            entries[name] = {
                "position": config.model.position,
                "length": config.train.length,
                "batch": config.train.batch,
                "vocab_size": config.data.vocab_size,
                "train_seconds": timings[f"train {name}"].seconds,
                "read_seconds": timings[f"read {name}"].seconds if f"read {name}" in timings else None,
                "tokens": config.train.batch * config.train.length,
                "train_memory": max(memories[name]) if memories.get(name) else None,
                "train_memories": memories.get(name),
                "session": f"{origin['time']}, up to {length}",
                "provenance": origin,
            }
    write_with_checksum(path, {"format": COST_FORMAT, "entries": entries})


def _time_interleaved(rigs: dict[str, StepBenchmark], read: list[str]) -> dict[str, Timing]:
    work = {f"train {name}": rig.step for name, rig in rigs.items()}
    work |= {f"read {name}": rigs[name].infer for name in read}
    once = time_interleaved(work, 1)
    rounds = round(TIMING_BUDGET_SECONDS / sum(timing.best for timing in once.values()))
    return time_interleaved(work, max(MIN_ROUNDS, min(MOST, rounds)), warmup=0)


def _memories(configs: dict[str, RunConfig], device: str) -> dict[str, list[int]]:
    """Peaks of training, `WEIGHINGS` of each; empty where the device does not tell."""

    def weigh(config: RunConfig) -> int | None:
        measured = run_in_subprocess(
            "trainshort.evaluate.step_cost", config=config.model_dump(mode="json"), device=device
        )
        return measured["training"].get("above")

    with ThreadPoolExecutor(available_cores() if device == "cpu" else 1) as several:
        begun = {name: several.map(weigh, [config] * MEMORY_MEASUREMENTS) for name, config in configs.items()}
        return {name: [peak for peak in peaks if peak is not None] for name, peaks in begun.items()}


WRITTEN, TIMES = 64, (1, 4, 16)
"""Tokens written (at most half a training length), and where: they end at so many training lengths of text."""
TEMPERATURE, TOP_K, SEED = 0.8, 40, 1


def write_sample(run: Path, path: Path) -> None:
    """Continue the test text where so much of it was read that the last token written stands at 1, 4 and 16 times the
    training length; each token with the model's own surprise at it."""
    target = RunTarget(run)
    text = open_run_data(run, target.config.data).split("test")
    length, tokenizer = target.config.train.length, target.tokenizer()
    count = max(1, min(WRITTEN, length // 2))
    settings = {"temperature": TEMPERATURE, "top_k": min(TOP_K, target.vocab_size), "seed": SEED}
    passages = []
    for end in (times * length for times in TIMES if times * length <= len(text)):
        prompt = np.asarray(text[: end - count]).astype(np.int64)
        # Without a tokenizer nothing stops the stream early: an end of text is a token like any other here.
        made = list(stream(target.model, prompt, tokens=count, **settings))
        ids = [token.id for token in made]
        read = [tokenizer.decode(ids[:number]) for number in range(count + 1)]
        written = [
            [after[len(before) :], -token.logprob] for before, after, token in zip(read, read[1:], made, strict=False)
        ]
        passages.append({"end": end, "given": tokenizer.decode(prompt[-count:]), "written": written})
    record = {
        "format": SAMPLE_FORMAT,
        "run": run.name,
        "trained_at": length,
        "settings": settings,
        "passages": passages,
        "provenance": collect_provenance(threads=torch.get_num_threads()),
    }
    make_folder(path.parent)
    write_with_checksum(path, record)


def measure_reach(folder: Path) -> None:
    """How far each head looks, by `trainshort analyze`."""
    target = RunTarget(folder)
    text = open_text(target, ())
    lab = AnalysisContext(target, text.tokens, target.config.train.length)
    analyze(lab, text, ["reach"], new_console(quiet=True))
