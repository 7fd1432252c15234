"""The page: templates filled, everything escaped, and a policy under which only our own scripts may run."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING, Any

from trainshort.experiments.claims.verdicts import Claim, Outcome
from trainshort.report.plotly_figures import plotly_script, specification
from trainshort.utils.figures import Figure
from trainshort.utils.optional import require_package

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup


def template(name: str) -> str:
    return resources.files("trainshort.report").joinpath("templates", name).read_text(encoding="utf-8")


def _page(name: str, **filters: Callable[[Any], str]) -> "Template":
    """Ready to be filled. `code`: our own sentences name commands between backticks, which the page shows as code."""
    require_package("jinja2", "Writing a report", "trainshort[report]")
    from jinja2 import Environment, StrictUndefined

    html = name.endswith(".html")
    environment = Environment(autoescape=html, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= filters
    environment.globals["why"] = _why
    return environment.from_string(template(name))


def html(content: dict[str, Any], drawn: list[Figure]) -> str:
    """index.html: no address but its own data folder, no script but the two whose hashes the policy names."""
    require_package("jinja2", "Writing a report", "trainshort[report]")
    from markupsafe import Markup

    script, plotly = template("page.js"), plotly_script()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(plotly)}' '{_hash(script)}'",
            "style-src 'unsafe-inline'",  # plotly sets styles as it draws
            "img-src 'self' data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return _page("index.html", code=_code).render(
        content,
        policy=Markup(policy),
        style=Markup(template("style.css")),
        data=Markup(_safe_json([specification(figure) for figure in drawn])),
        plotly=Markup(plotly),
        script=Markup(script),
    )


def markdown(content: dict[str, Any]) -> str:
    """report.md; text that came from runs cannot become mark-up."""
    filled = _page("report.md", md=_plain_markdown, code=_markdown_code).render(content)
    return re.sub(r"\n{3,}", "\n\n", filled).strip() + "\n"


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _safe_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plain_markdown(text: Any) -> str:
    plain = re.sub(r"\s+", " ", str(text))
    return re.sub(r"([\\`*_\[\]<>|#!~])", r"\\\1", plain)


def _code(text: str) -> "Markup":
    from markupsafe import Markup, escape

    return Markup(re.sub("`(.*?)`", r"<code>\1</code>", str(escape(text))))


def _markdown_code(text: str) -> str:
    return re.sub(r"\\`(.*?)\\`", r"`\1`", _plain_markdown(text))


def _why(claim: Claim, outcome: Outcome) -> str:
    """The reason, what could have been detected, and when the rule was fixed."""
    least = f"These runs could tell {outcome.smallest_detectable}." if outcome.smallest_detectable else ""
    return " ".join(part for part in (outcome.reason, least, claim.rule.note) if part)
