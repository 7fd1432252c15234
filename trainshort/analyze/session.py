"""One `trainshort analyze`: the analyses asked for, one after the other, each with a file, a table and a sentence.

Each answer is saved as it is found, and one that is there already for the same model, text and settings is shown, not
found again: a command that was stopped goes on when it is given again.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from trainshort.analyze import Lab, analyses
from trainshort.analyze.base import Notes
from trainshort.errors import InputError
from trainshort.evaluate.meter import Meter
from trainshort.evaluate.text import Text
from trainshort.files import make_folder, read_sealed, write_sealed
from trainshort.runs import provenance

FORMAT = 2
"""2: conclusions by the rule of evaluate.evidence."""


def analyze(lab: Lab, text: Text, names: Sequence[str], console: Console, again: bool = False) -> list[Path]:
    """Answer each question and write analysis/NAME.json in the target's folder. When all were asked for, one that does
    not fit this model is passed over in words; one that was asked for by name is an error."""
    written = []
    origin = _origin(lab, text)
    notes = Console(stderr=True, quiet=console.quiet)
    asked = names or sorted(analyses.names(), key=lambda name: analyses.get(name).slow)
    for number, name in enumerate(asked, start=1):
        chosen, path = analyses.get(name), lab.target.folder / "analysis" / f"{name}.json"
        console.print(f"\n[bold]{name}[/] ({number} of {len(asked)}): {chosen.question}", highlight=False)
        result = None if again else _stored(path, origin)
        if result is not None:
            console.print("known from before; --again asks anew.", highlight=False)
        else:
            make_folder(path.parent)
            partial = path.with_suffix(f".{origin['digest']}.partial")
            try:
                with Meter(notes) as meter:
                    result = chosen.run(replace(lab, meter=meter, notes=Notes(partial)))
            except InputError as error:
                if names:
                    raise
                console.print(f"passed over: {error}", highlight=False, markup=False)
                continue
            _write(path, name, origin, result)
            partial.unlink(missing_ok=True)
        written.append(path)
        console.print(chosen.table(result))
        console.print(f"{result['summary']}.", highlight=False)
    console.print("\nWritten: " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)
    return written


def _origin(lab: Lab, text: Text) -> dict[str, Any]:
    """What an answer depends on, and a digest of it."""
    settings = {"trained_at": lab.trained_at, "lengths": list(lab.lengths), "samples": lab.samples, "seed": lab.seed}
    target, corpus = lab.target.description(), text.description()
    depends = [FORMAT, target["weights"], corpus["sha256"], settings]
    digest = sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:8]
    return {"digest": digest, "target": target, "corpus": corpus, "settings": settings}


def _stored(path: Path, origin: dict[str, Any]) -> dict[str, Any] | None:
    """The answer that an earlier session found to this very question."""
    if not path.is_file():
        return None
    content = read_sealed(path, mend="Remove it and analyze again.")
    same = content.get("format") == FORMAT and content.get("digest") == origin["digest"]
    return content["result"] if same else None


def _write(path: Path, name: str, origin: dict[str, Any], result: dict[str, Any]) -> None:
    content = {
        "format": FORMAT,
        "analysis": name,
        **origin,
        "result": result,
        "provenance": provenance(threads=torch.get_num_threads()),
    }
    write_sealed(path, content)
