"""Every number the paper prints, as data that ships with the package (paper_tables.json)."""

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def published() -> dict[str, Any]:
    """Tables and figures by name. Lengths that are keys are strings there, as JSON has them."""
    text = resources.files("trainshort.recipes").joinpath("paper_tables.json").read_text(encoding="utf-8")
    return json.loads(text)
