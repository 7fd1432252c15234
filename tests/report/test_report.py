"""The report shows the numbers of the stored results, escapes all text, and works in a real browser."""

import hashlib
import json
import re
import shutil
import subprocess
import zlib
from base64 import b64encode
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from synthetic_results import make_demo, make_run

from trainshort.cli.paper import Report
from trainshort.config.run_config import load_config
from trainshort.data.passes import Passes
from trainshort.errors import InputError
from trainshort.evaluate.results import load, save, summarize
from trainshort.evaluate.significance import Bin, describe_change_past_training, pool_bins
from trainshort.experiments.claims.collection import collect
from trainshort.report.headline import Headline, find_headline, headline_sentences
from trainshort.report.sections import reach_figure
from trainshort.report.summary import introduction
from trainshort.report.write import headline_table, write_report
from trainshort.utils.figures import round_ticks
from trainshort.utils.io import write_with_checksum

# A name of a run that would run a script or break Markdown if it were not escaped.
HOSTILE = "<img src=x onerror=alert(1)>\"'{{7*7}}&amp;`|*_"
HOSTILE_NAMES = [f"{number}{HOSTILE.replace('/', '')}" for number in (1, 2)]


class Page(HTMLParser):
    """The parts of an HTML page that tests look at.

    Attributes:
        links: The addresses of all links.
        images: The addresses of all images.
        handlers: The names of all event handlers, such as "onclick".
        scripts: The code of all scripts. The JSON data of the figures is not a script.
        texts: All texts that the page shows.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.images: list[str] = []
        self.handlers: list[str] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self._open_element: str | None = None  # "script", "data" (styles and JSON), or None for text
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.handlers += [name for name in values if name.startswith("on")]
        if tag == "a":
            self.links.append(values.get("href") or "")
        if tag == "img":
            self.images.append(values.get("src") or "")
        if tag == "style" or values.get("type") == "application/json":
            self._open_element = "data"
        elif tag == "script":
            self._open_element = "script"

    def handle_data(self, data):
        if self._open_element == "script":
            self.scripts.append(data)
        elif self._open_element is None:
            self.texts.append(data)

    def handle_endtag(self, tag):
        self._open_element = None


class DemoReport(NamedTuple):
    """The report of the demo with invented results.

    Attributes:
        runs: The folder of the run folders.
        out: The folder of the report.
        html: The content of `index.html`.
        markdown: The content of `report.md`.
    """

    runs: Path
    out: Path
    html: str
    markdown: str


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> DemoReport:
    root = tmp_path_factory.mktemp("demo")
    make_demo(root / "runs")
    page = write_report(collect([root / "runs"]), root / "report")
    markdown = (page.parent / "report.md").read_text(encoding="utf-8")
    return DemoReport(root / "runs", page.parent, page.read_text(encoding="utf-8"), markdown)


def get_headline(*folders: Path) -> Headline:
    """Return the curves of the runs in some folders."""
    headline = find_headline(collect(folders))
    assert headline is not None
    return headline


# ---- the files and numbers of a report


def test_all_files_are_written(demo):
    for name in (
        "index.html",
        "report.md",
        "claims.json",
        "headline.png",
        "headline.svg",
        "positions.svg",
        "cost-train.png",
    ):
        assert (demo.out / name).stat().st_size > 500, name
    assert (demo.out / "headline.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_equal_the_linked_files(demo):
    cells = re.findall(r'<a href="(data/[^"]+)" title="([0-9.]+)">([0-9.]+)</a>', demo.html)
    assert len(cells) == 4 * 8  # four methods at eight lengths
    exact_numbers: dict[str, list[float]] = {}
    for link, exact, rounded in cells:
        exact_numbers.setdefault(link, []).append(float(exact))
        assert f"{float(exact):.2f}" == rounded
    for link, numbers in exact_numbers.items():
        assert numbers == [row.perplexity for row in load(demo.out / link).rows]


def test_all_links_lead_to_files_in_the_folder(demo):
    page = Page(demo.html)
    assert len(page.links) > 60
    for link in (*page.links, *page.images):
        assert not re.match(r"[a-z]+:|//|/", link), link
        assert (demo.out / link).is_file(), link


def test_figures_are_not_drawn_again_if_nothing_changed(demo):
    time_of_change = (demo.out / "headline.png").stat().st_mtime_ns
    write_report(collect([demo.runs]), demo.out)
    assert (demo.out / "headline.png").stat().st_mtime_ns == time_of_change


def test_ticks_are_round_numbers():
    assert round_ticks(67, 110) == [70, 80, 90, 100, 110, 120]
    assert round_ticks(18, 400) == [20, 50, 100, 200]
    assert round_ticks(4.0, 4.3) == pytest.approx([4.0, 4.1, 4.2, 4.3])


def test_table_for_the_terminal(demo):
    table = headline_table(collect([demo.runs]))
    assert table is not None
    headers = [column.header for column in table.columns]
    assert headers == ["trained at 128, evaluated at", "ALiBi", "T5 bias", "Rotary", "Sinusoidal"]
    assert list(table.columns[1].cells)[-1] == "48.00"


# ---- the texts of a report


def test_sentences_contain_the_numbers(demo):
    best, extrapolating, degrading = headline_sentences(get_headline(demo.runs))
    assert "128 tokens, ALiBi has the lowest perplexity: 50.0 (T5 bias 50.0, Rotary 51.0, Sinusoidal 52.0)." in best
    assert extrapolating.startswith("At 2,048 tokens (16 times the training length)")
    assert extrapolating.endswith("for ALiBi (-4.0%).")
    assert degrading.endswith("for Sinusoidal (+265%), Rotary (+116%) and T5 bias (+80%).")
    for sentence in (best, extrapolating, degrading):
        assert sentence in demo.html


def test_introduction_describes_the_models(demo):
    text = introduction(get_headline(demo.runs))
    assert text.startswith("4 small language models (ALiBi, T5 bias, Rotary, Sinusoidal) were trained")
    assert "differ only in the method" in text


def test_tables_show_measured_and_published_numbers(demo):
    assert 'id="table5"' in demo.html
    assert 'id="table15"' in demo.html
    assert "## table2: Extrapolation of the four methods, trained at 512" in demo.markdown
    assert re.search(r"\| 512 \| \[52\.00\]\(data/[^)]+\) \(20\.05\) \|", demo.markdown)


@pytest.mark.parametrize(
    ("table", "costs"),
    [("table1", "train speed, read speed, train memory."), ("table6", "train speed.\n"), ("table5", None)],
)
def test_costs_are_labelled_as_measured_with_random_weights(demo, table, costs):
    cost_section = demo.html[demo.html.index('id="cost"') : demo.html.index('id="tables"')]
    assert "with random weights and random tokens" in cost_section

    text = demo.markdown[demo.markdown.index(f"## {table}:") :].partition("|---")[0]
    if costs is None:
        assert "random weights" not in text
    else:
        assert f"with random weights and random tokens: {costs}" in text


def test_claims_are_stored_with_scale_verdict_and_reason(demo):
    claims = json.loads((demo.out / "claims.json").read_text())
    assert {claim["scale"] for claim in claims} == {"laptop"}
    assert {claim["verdict"] for claim in claims} == {"supported", "not tested"}
    for claim in claims:
        assert claim["reason"]
        assert f'id="claim-{claim["name"]}"' in demo.html


def test_report_says_which_criteria_were_changed_after_results_were_known(demo):
    claims = json.loads((demo.out / "claims.json").read_text())
    changed = {claim["name"] for claim in claims if claim["rule"]["numbers seen"]}
    assert {"same-speed", "others-slower", "extrapolation-order", "sooner", "alibi-holds", "same-memory"} <= changed
    assert "optimum-near-2l" not in changed
    assert all(re.fullmatch(r"[0-9a-f]{7}", claim["rule"]["commit"]) for claim in claims)

    assert f"{13 - len(changed)} of 13 criteria were written before results were available" in demo.html
    notes = re.findall(r"Criterion changed on 2026-11-1[67], after results were available: ", demo.html)
    assert len(notes) == len(changed)


def test_figures_have_text_alternatives(demo):
    alternatives = re.findall(r'role="img" aria-label="([^"]+)"', demo.html)
    assert len(alternatives) >= 6
    assert "ALiBi goes from 50.0 at 128 to 48.0 at 2,048" in alternatives[0]
    assert any("over all heads: ALiBi from 30 to 90 tokens" in text for text in alternatives)


def test_commands_are_shown_as_code(demo):
    assert not any("`" in text for text in Page(demo.html).texts)
    assert "<code>--only " in demo.html
    assert "(`--only" in demo.markdown


# ---- the curves of the main figure


def test_runs_on_different_texts_are_not_in_one_figure(tmp_path):
    make_run(tmp_path, "alibi", {128: 50.0, 256: 49.0})
    make_run(tmp_path, "rotary", {128: 51.0, 256: 60.0})
    folder = make_run(tmp_path, "sinusoidal", {128: 20.0, 256: 90.0})
    path = next((folder / "eval").glob("*.json"))
    evaluation = load(path)
    # The other text has the same number of tokens.
    save(evaluation.model_copy(update={"corpus": {**evaluation.corpus, "sha256": "another text"}}), path)
    assert [curve.name for curve in get_headline(tmp_path).curves] == ["ALiBi", "Rotary"]


def test_two_runs_of_one_method_have_their_own_names_and_colors(tmp_path):
    for name, steps in (("mine", 10), ("longer", 20)):
        folder = make_run(tmp_path, "alibi", {128: 50.0, 256: 49.0}, name=name)
        config = load_config(folder / "config.json").replace(train={"steps": steps})
        (folder / "config.json").write_text(config.model_dump_json())
    make_run(tmp_path, "rotary", {128: 51.0, 256: 60.0})

    headline = get_headline(tmp_path)
    colors = {curve.name: curve.color for curve in headline.curves}
    assert len(set(colors.values())) == 3
    reach = reach_figure(headline, collect([tmp_path]))
    assert reach is not None
    assert {line.name: line.color for line in reach.series if not line.is_reference} == colors

    text = introduction(headline)
    assert text.startswith("3 small language models (longer, mine, Rotary) were trained on sequences of 128 tokens")
    assert "differ only" not in text


def test_two_folders_with_the_same_name_are_two_runs(tmp_path):
    for parent, lr, last_perplexity in (("first", 0.001, 49.0), ("second", 0.004, 60.0)):
        folder = make_run(tmp_path / parent, "alibi", {128: 50.0, 256: last_perplexity}, name="run")
        config = load_config(folder / "config.json").replace(optim={"lr": lr})
        (folder / "config.json").write_text(config.model_dump_json())
    headline = get_headline(tmp_path / "first", tmp_path / "second")
    assert sorted(curve.points[256] for curve in headline.curves) == pytest.approx([49.0, 60.0])


def test_longer_model_with_a_loss_that_is_not_finite_is_left_out(tmp_path):
    make_run(tmp_path, "alibi", {128: 50.0, 256: 49.0})
    folder = make_run(tmp_path, "sinusoidal", {768: 47.0}, length=3072)
    path = next((folder / "eval").glob("*.json"))
    evaluation = load(path)
    save(evaluation.with_row(evaluation.rows[0].replace(status="not finite")), path)
    assert get_headline(tmp_path).longer_models == ()


def test_runs_that_belong_to_no_scale_make_a_report_without_tables(tmp_path):
    folder = make_run(tmp_path / "runs", "alibi", {128: 50.0, 256: 49.0}, name="mine")
    config = json.loads((folder / "config.json").read_text())
    config["optim"]["lr"] = 0.5
    (folder / "config.json").write_text(json.dumps(config))
    html = write_report(collect([folder]), tmp_path / "report").read_text(encoding="utf-8")
    assert "At the training length of 128 tokens" in html
    assert 'id="tables"' not in html


# ---- loss by position


def pool_losses(losses: np.ndarray, length: int) -> list[Bin]:
    """Return the loss by position of a text that is evaluated without overlap."""
    return pool_bins(summarize(Passes(len(losses), length, length), losses))


def test_loss_by_position_pools_positions_with_few_predictions():
    # 16,384 tokens make 8 inputs of 2,048 tokens. A single position has 8 predictions.
    losses = np.random.default_rng(0).normal(4, 2.5, 16_384)
    bins = pool_losses(losses, 2048)
    assert min(position_bin.count for position_bin in bins) >= 200
    assert sum(position_bin.count for position_bin in bins) == 16_384
    assert [position_bin.end for position_bin in bins][:-1] == [position_bin.first for position_bin in bins][1:]
    for position_bin in bins:
        assert position_bin.error == pytest.approx(2.5 / position_bin.count**0.5, rel=0.25)


def test_change_past_training_is_reported_only_if_it_is_significant():
    rng = np.random.default_rng(0)
    same = pool_losses(rng.normal(4, 2.5, 16_384), 2048)
    assert describe_change_past_training(same, 128).startswith("shows no change (")
    assert describe_change_past_training(same[:1], 10**6) == "was not evaluated past the training length"
    assert describe_change_past_training(same[-1:], 1) == "has too few predictions before the training length"

    is_past_training = Passes(16_384, 2048, 2048).positions() >= 128
    change = np.where(is_past_training, 0.6, 0.0)
    worse = pool_losses(rng.normal(4, 2.5, 16_384) + change, 2048)
    assert describe_change_past_training(worse, 128).startswith("rises by 0.")
    better = pool_losses(rng.normal(4, 2.5, 16_384) - change, 2048)
    assert describe_change_past_training(better, 128).startswith("falls by 0.")


# ---- invalid input


@pytest.mark.parametrize("path", ["", "relative"])
def test_folder_without_results_is_an_error(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    folder = Path() if path else tmp_path
    expected = "this folder" if path else str(tmp_path)
    with pytest.raises(InputError, match=rf"no results found in {expected}.*trainshort reproduce"):
        Report((folder,), tmp_path / "out").run()


def test_missing_folder_is_an_error(tmp_path):
    with pytest.raises(InputError, match="no folder was given"):
        Report(()).run()
    with pytest.raises(InputError, match=f"not found: {tmp_path / 'nowhere'}"):
        Report((tmp_path / "nowhere",)).run()


def test_output_path_that_is_a_file_is_an_error(tmp_path):
    make_run(tmp_path / "runs", "alibi", {128: 50.0, 256: 49.0})
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=f"Expected a folder at {tmp_path / 'file'}"):
        Report((tmp_path / "runs",), tmp_path / "file").run()


@pytest.mark.parametrize("target", ["nowhere", "config.json"])
def test_broken_link_to_a_config_is_an_error(tmp_path, target):
    for name in ("valid", "broken"):
        make_run(tmp_path / "runs", "alibi", {128: 50.0, 256: 49.0}, name=name)
    config = tmp_path / "runs" / "broken" / "config.json"
    config.unlink()
    config.symlink_to(target)
    with pytest.raises(InputError, match=f"{config}: not a regular file"):
        Report((tmp_path / "runs",), tmp_path / "out").run()


@pytest.mark.parametrize(
    "content", ["", "null", '{"result": {"rows": []}, "format": 2}', '{"trained_at": 1e999}', "{}"]
)
@pytest.mark.parametrize("file", ["analysis/reach.json", "samples/sample.json"])
def test_damaged_result_file_is_an_error(tmp_path, file, content):
    folder = make_run(tmp_path / "runs", "alibi", {128: 50.0, 256: 49.0})
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(content)
    with pytest.raises(InputError, match=rf"{file}.* Remove it"):
        Report((tmp_path / "runs",), tmp_path / "out").run()


# ---- security


def write_hostile_report(root: Path) -> Path:
    """Write the report of two runs whose names, corpus and text samples contain scripts. Return `index.html`.

    The names of runs are shown, because both runs have the same method.
    """
    script = "</div><script>alert('written')</script>"
    passages = [{"end": 128, "given": script, "written": [[script, 2.5]]}]
    for number, name in enumerate(HOSTILE_NAMES, start=1):
        folder = make_run(root / "runs", "alibi", {128: 50.0, 256: 49.0}, name=name)
        config = (folder / "config.json").read_text()
        (folder / "config.json").write_text(config.replace('"weight_decay": 0.1', f'"weight_decay": 0.{number}'))

        path = next((folder / "eval").glob("*.json"))
        evaluation = json.loads(path.read_text())
        evaluation["corpus"]["name"] = "</script><script>alert(2)</script>"
        write_with_checksum(path, evaluation)

        (folder / "samples").mkdir()
        sample = {"format": 2, "trained_at": 128, "passages": passages}
        write_with_checksum(folder / "samples" / "sample.json", sample)
    return write_report(collect([root / "runs"]), root / "report")


def test_security_policy_allows_only_the_scripts_of_the_report(demo):
    page = Page(demo.html)
    match = re.search(r'Content-Security-Policy" content="([^"]+)"', demo.html)
    assert match
    policy = match.group(1)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert len(page.scripts) == 2
    hashes = ["sha256-" + b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts]
    assert re.findall(r"sha256-[A-Za-z0-9+/=]+", policy) == hashes
    assert not page.handlers


def test_hostile_text_is_escaped_in_html(tmp_path):
    html = write_hostile_report(tmp_path).read_text(encoding="utf-8")
    page = Page(html)
    assert len(page.scripts) == 2
    assert not page.handlers
    for link in page.links + page.images:
        assert re.fullmatch(r"[\w.-]+\.(png|svg)|data/[\w.-]+\.json", link), link
    assert "alert(1)" in html  # shown as text
    assert "<script>alert" not in html
    assert all(name in page.texts for name in HOSTILE_NAMES)  # The template does not evaluate {{7*7}}.


def test_hostile_text_is_escaped_in_markdown(tmp_path):
    markdown = (write_hostile_report(tmp_path).parent / "report.md").read_text()
    without_backslashes = re.sub(r"\\(.)", r"\1", markdown)
    assert all(name in without_backslashes for name in HOSTILE_NAMES)
    assert "<script>alert" not in markdown
    assert not re.search(r"(?<!\\)<img", markdown)


# ---- a real browser


def run_browser(page: Path, *options: str) -> subprocess.CompletedProcess:
    """Open a page in Chromium without a window. Skip the test if Chromium is not installed.

    Args:
        page: The HTML file.
        options: Further options of Chromium.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("Chromium is not installed")
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--virtual-time-budget=20000",
        "--enable-logging=stderr",
        f"--user-data-dir={page.parent / 'profile'}",
        *options,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_browser_draws_all_figures_without_errors(demo):
    process = run_browser(demo.out / "index.html", "--dump-dom")
    assert "CONSOLE" not in process.stderr, process.stderr
    headline = process.stdout[process.stdout.index('id="plot-headline"') :].partition("</figure>")[0]
    # Each of the four methods has a band, a line and the line of the paper.
    assert len(re.findall(r'class="trace scatter', headline)) == 4 * 3
    drawn_plots = re.findall(r'class="plot[^"]*js-plotly-plot', process.stdout)
    assert len(drawn_plots) == len(re.findall(r'id="plot-', process.stdout))


def test_browser_runs_no_hostile_script(tmp_path):
    process = run_browser(write_hostile_report(tmp_path), "--dump-dom")
    assert "CONSOLE" not in process.stderr, process.stderr
    page = Page(process.stdout)
    assert not page.handlers
    assert all(re.fullmatch(r"[\w.-]+\.(png|svg)", image) for image in page.images)


def print_page(page: Path) -> list[bytes]:
    """Print a page with Chromium. Return the drawing commands of each printed sheet."""
    pdf = page.with_suffix(".pdf")
    run_browser(page, f"--print-to-pdf={pdf}", "--no-pdf-header-footer")
    streams = re.findall(rb"/FlateDecode.*?stream\r?\n(.*?)\r?\nendstream", pdf.read_bytes(), re.DOTALL)
    decompressed = [zlib.decompressobj().decompress(stream) for stream in streams]
    # Other streams are fonts and images. They contain no command that selects a font (Tf).
    return [stream for stream in decompressed if b" Tf" in stream]


@pytest.mark.slow
def test_folded_parts_are_printed(demo, tmp_path):
    assert demo.html.count("<details>") >= 3
    sheets = {}
    for name, html in (("folded", demo.html), ("open", demo.html.replace("<details>", "<details open>"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text(html, encoding="utf-8")
        sheets[name] = print_page(tmp_path / name / "index.html")
    assert len(sheets["folded"]) > 3
    assert [len(sheet) for sheet in sheets["folded"]] == [len(sheet) for sheet in sheets["open"]]
