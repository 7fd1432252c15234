"""The page: templates filled, everything escaped, and a policy under which only our own scripts may run."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from trainshort.claims.verdicts import Claim, Outcome
from trainshort.plots.figures import Figure
from trainshort.plots.plotly import plotly_script, specification

CLASSES = {"holds": "holds", "does not hold": "fails", "cannot tell": "open", "not testable at this scale": "open"}


def template(name: str) -> str:
    return resources.files("trainshort.report").joinpath("templates", name).read_text(encoding="utf-8")


def html(content: dict[str, Any], drawn: list[Figure]) -> str:
    """index.html: no address but its own data folder, no script but the two whose hashes the policy names."""
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
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals["row"] = lambda claim, outcome: _claim_row(claim, outcome, content["link"])
    return environment.from_string(template("index.html")).render(
        content,
        policy=Markup(policy),
        style=Markup(template("style.css")),
        data=Markup(_safe_json([specification(figure) for figure in drawn])),
        plotly=Markup(plotly),
        script=Markup(script),
    )


def markdown(content: dict[str, Any]) -> str:
    """report.md; text that came from runs cannot become mark-up."""
    environment = Environment(autoescape=False, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["md"] = _plain_markdown
    environment.globals["why"] = _why
    environment.filters["code"] = lambda text: _code(text, _plain_markdown, ("`", "`"))
    filled = environment.from_string(template("report.md")).render(content)
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


def _code(text: Any, escaped: Callable[[Any], str], around: tuple[str, str]) -> str:
    """Our own sentences name commands between backticks; in the page these are code, and not backticks."""
    parts = str(text).split("`")
    begin, end = around
    return "".join(f"{begin}{escaped(part)}{end}" if i % 2 else str(escaped(part)) for i, part in enumerate(parts))


def _why(claim: Claim, outcome: Outcome) -> str:
    """The reason, what could have been detected, and when the rule was fixed."""
    least = f"These runs could tell {outcome.detectable}." if outcome.detectable else ""
    return " ".join(part for part in (outcome.reason, least, claim.rule.told) if part)


def _claim_row(claim: Claim, outcome: Outcome, link: Any) -> Markup:
    links = Markup("").join(
        Markup(' <a href="{}">[{}]</a>').format(link(path), index) for index, path in enumerate(outcome.sources, 1)
    )
    return Markup(
        '<tr id="{}"><td>{}</td><td>{}</td><td>{}{}</td><td><span class="v {}">{}</span><br>'
        '<span class="note">{}</span></td></tr>'
    ).format(
        f"claim-{claim.name}",
        claim.statement,
        claim.published,
        escape(outcome.obtained),
        links,
        CLASSES[outcome.verdict],
        outcome.verdict,
        Markup(_code(_why(claim, outcome), escape, ("<code>", "</code>"))),
    )
