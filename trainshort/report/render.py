"""Fill the templates of the report.

Text from runs, such as names, is escaped. The content security policy of the HTML page allows only the scripts of the
report.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING, Any

from trainshort.experiments.claims.verdicts import Claim, Outcome
from trainshort.report.plotly_figures import plotly_specification, read_plotly_script
from trainshort.utils.figures import Figure
from trainshort.utils.optional import require_package

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup


def render_html(content: dict[str, Any], figures: list[Figure]) -> str:
    """Return the HTML page (`index.html`).

    The page loads no files except images and data files from its own folder. It runs only the two scripts whose hashes
    are in its content security policy.

    Args:
        content: The variables of the template. See `write_report`.
        figures: The figures of the page.
    """
    require_package("jinja2", "Writing a report", "trainshort[report]")
    from markupsafe import Markup

    page_script = read_template("page.js")
    plotly_script = read_plotly_script()
    figure_data = _to_script_safe_json([plotly_specification(figure) for figure in figures])
    # `Markup` marks text that must not be escaped. It is used only for text that does not come from runs, and for JSON.
    return _make_template("index.html", code=_html_with_code).render(
        content,
        policy=Markup(_make_security_policy([plotly_script, page_script])),
        style=Markup(read_template("style.css")),
        data=Markup(figure_data),
        plotly=Markup(plotly_script),
        script=Markup(page_script),
    )


def render_markdown(content: dict[str, Any]) -> str:
    """Return the report as Markdown (`report.md`).

    Args:
        content: The variables of the template. See `write_report`.
    """
    template = _make_template("report.md", md=_escape_markdown, code=_markdown_with_code)
    text = template.render(content)
    # The template leaves several empty lines in a row where a section is missing.
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def read_template(name: str) -> str:
    """Return the content of a file in the folder `templates`."""
    path = resources.files("trainshort.report").joinpath("templates", name)
    return path.read_text(encoding="utf-8")


def _make_template(name: str, **filters: Callable[[Any], str]) -> "Template":
    """Return a jinja2 template.

    Args:
        name: The file name of the template. Variables in HTML templates are escaped automatically.
        filters: Functions that convert a value to text. The template calls a filter as `{{ value|name }}`.
    """
    require_package("jinja2", "Writing a report", "trainshort[report]")
    from jinja2 import Environment, StrictUndefined

    is_html = name.endswith(".html")
    environment = Environment(autoescape=is_html, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= filters
    environment.globals["explain"] = _explain_outcome  # Templates call `explain(claim, outcome)`.
    return environment.from_string(read_template(name))


def _explain_outcome(claim: Claim, outcome: Outcome) -> str:
    """Return the text that explains the verdict on a claim of the paper.

    The text contains the reason of the verdict, the smallest difference that the measurements can detect, and a note if
    the criterion was changed after results were available.
    """
    sentences = [outcome.reason]
    if outcome.smallest_detectable:
        sentences.append(f"These runs can detect {outcome.smallest_detectable} or more.")
    if claim.criterion.note:
        sentences.append(claim.criterion.note)
    return " ".join(sentences)


# ---- security of the HTML page


def _make_security_policy(scripts: list[str]) -> str:
    """Return a content security policy that allows only certain inline scripts.

    Args:
        scripts: The code of the allowed scripts.
    """
    script_hashes = " ".join(f"'{_hash_script(script)}'" for script in scripts)
    rules = [
        "default-src 'none'",
        f"script-src {script_hashes}",
        "style-src 'unsafe-inline'",  # plotly sets styles while it draws.
        "img-src 'self' data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join(rules)


def _hash_script(script: str) -> str:
    """Return the hash of a script in the format of a content security policy, such as "sha256-n4bQgY..."."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _to_script_safe_json(value: Any) -> str:
    """Return JSON without the characters <, > and &, so that its text cannot end the script element around it."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# ---- escaping text


def _html_with_code(text: str) -> "Markup":
    """Escape text for HTML, and convert parts between backticks to code elements.

    For example, "Use `--only demo`." becomes "Use <code>--only demo</code>.". `Markup` marks text that the template
    must not escape again.
    """
    from markupsafe import Markup, escape

    escaped = str(escape(text))
    return Markup(re.sub("`(.*?)`", r"<code>\1</code>", escaped))


def _escape_markdown(text: Any) -> str:
    """Escape the special characters of Markdown, and replace line breaks by spaces."""
    one_line = re.sub(r"\s+", " ", str(text))
    return re.sub(r"([\\`*_\[\]<>|#!~])", r"\\\1", one_line)


def _markdown_with_code(text: str) -> str:
    """Escape text for Markdown, but keep backticks around code."""
    return re.sub(r"\\`(.*?)\\`", r"`\1`", _escape_markdown(text))
