"""The report: its numbers are the JSON's, nothing can be injected, and it opens in a real browser."""

import hashlib
import json
import re
import shutil
import subprocess
import zlib
from base64 import b64encode
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from synthetic_results import make_demo, make_run

from trainshort.cli.paper import Report
from trainshort.config.run_config import load_config
from trainshort.data.passes import Passes
from trainshort.errors import InputError
from trainshort.evaluate.results import load, save, summarize
from trainshort.evaluate.significance import describe_change_past_training, pool_bins
from trainshort.experiments.claims.collection import collect
from trainshort.report.headline import find_headline, sentences
from trainshort.report.sections import reach_figure
from trainshort.report.summary import introduction
from trainshort.report.write import headline_table, write_report
from trainshort.utils.figures import round_ticks
from trainshort.utils.io import write_with_checksum

HOSTILE = "<img src=x onerror=alert(1)>\"'{{7*7}}&amp;`|*_"


class Page(HTMLParser):
    """Elements of a page: links, scripts, and attributes that could run something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.images: list[str] = []
        self.handlers: list[str] = []
        self.scripts: list[str] = []
        self.titled: dict[str, list[tuple[str, str]]] = {}
        self.shown: list[str] = []
        self._open: str | None = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.handlers += [name for name in values if name.startswith("on")]
        if tag == "a":
            self.links.append(values.get("href") or "")
        if tag == "img":
            self.images.append(values.get("src") or "")
        if tag in ("script", "style"):
            self._open = "data" if tag == "style" or values.get("type") == "application/json" else "script"

    def handle_data(self, data):
        if self._open == "script":
            self.scripts.append(data)
        elif self._open is None:
            self.shown.append(data)

    def handle_endtag(self, tag):
        self._open = None


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    root = tmp_path_factory.mktemp("demo")
    make_demo(root / "runs")
    page = write_report(collect([root / "runs"]), root / "report")
    return root / "runs", page.parent, page.read_text(encoding="utf-8")


def test_files_are_there(demo):
    _, out, _ = demo
    for name in (
        "index.html",
        "report.md",
        "claims.json",
        "headline.png",
        "headline.svg",
        "positions.svg",
        "cost-train.png",
    ):
        assert (out / name).stat().st_size > 500, name
    assert (out / "headline.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_equal_the_json(demo):
    """Every linked number of the headline's table is what its file gives, to the last digit in the title."""
    _, out, text = demo
    cells = re.findall(r'<a href="(data/[^"]+)" title="([0-9.]+)">([0-9.]+)</a>', text)
    assert len(cells) == 4 * 8
    values = {}
    for link, full, shown in cells:
        values.setdefault(link, []).append(float(full))
        assert f"{float(full):.2f}" == shown
    for link, found in values.items():
        assert found == [row.perplexity for row in load(out / link).rows]


def test_every_link_leads_to_a_file_beside_the_page(demo):
    _, out, text = demo
    page = Page(text)
    assert len(page.links) > 60
    for link in (*page.links, *page.images):
        assert not re.match(r"[a-z]+:|//|/", link), link
        assert (out / link).is_file(), link


def test_only_our_scripts_may_run(demo):
    _, _, text = demo
    page = Page(text)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy
    hashes = re.findall(r"sha256-[A-Za-z0-9+/=]+", policy.group(1))
    assert policy.group(1).startswith("default-src 'none'; script-src 'sha256-")
    assert len(page.scripts) == 2
    made = ["sha256-" + b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts]
    assert made == hashes
    assert not page.handlers


def test_sentences_are_written_from_the_numbers(demo):
    runs, _, text = demo
    headline = find_headline(collect([runs]))
    assert headline is not None
    assert "4 small language models, alike but for how they know where in the text a word stands" in introduction(
        headline
    )
    assert sentences(headline) == [
        "Trained on 128 tokens at a time and evaluated at 128, ALiBi has the lowest perplexity, 50.0 "
        "(T5 bias 50.0, Rotary 51.0, Sinusoidal 52.0).",
        "Evaluated 16 times as far, at 2,048 tokens, ALiBi (-4.0%) is no worse.",
        "Getting worse over that distance: Sinusoidal by 265%, Rotary by 116% and T5 bias by 80%.",
    ]
    for sentence in sentences(headline):
        assert sentence in text


def test_tables_show_the_paper_beside_ours(demo):
    _, out, text = demo
    assert 'id="table5"' in text
    assert 'id="table15"' in text
    markdown = (out / "report.md").read_text()
    assert "## table2: Extrapolation of the four methods, trained at 512" in markdown
    assert re.search(r"\| 512 \| \[52\.00\]\(data/[^)]+\) \(20\.05\) \|", markdown)


def test_speeds_say_of_which_weights_they_are(demo):
    _, out, text = demo
    cost = text[text.index('id="cost"') : text.index('id="tables"')]
    assert "with random weights and tokens" in cost
    markdown = (out / "report.md").read_text()
    for name, told in (
        ("table1", "train speed, read speed, train memory."),
        ("table6", "train speed.\n"),
        ("table5", ""),
    ):
        table = markdown[markdown.index(f"## {name}:") :].partition("|---")[0]
        assert (f"Of random weights and tokens here: {told}" in table) == bool(told), name


def test_claims_are_stored_with_their_scale(demo):
    _, out, text = demo
    rows = json.loads((out / "claims.json").read_text())
    assert {row["scale"] for row in rows} == {"laptop"}
    assert {row["verdict"] for row in rows} == {"holds", "not testable at this scale"}
    assert all(f'id="claim-{row["name"]}"' in text for row in rows)
    assert all(row["reason"] for row in rows)
    later = {row["name"] for row in rows if row["rule"]["numbers seen"]}
    assert {"same-speed", "others-slower", "extrapolation-order", "sooner", "alibi-holds", "same-memory"} <= later
    assert "optimum-near-2l" not in later
    assert f"{13 - len(later)} of 13 rules were fixed before the first run was looked at; {len(later)} were" in text
    changed = re.findall(r"This rule was changed on 2026-11-1[67], after numbers had been seen: ", text)
    assert len(changed) == len(later)
    assert all(re.fullmatch(r"[0-9a-f]{7}", row["rule"]["commit"]) for row in rows)
    assert "was fixed before the runs" not in text


def test_figures_have_text_alternatives(demo):
    _, _, text = demo
    alternatives = re.findall(r'role="img" aria-label="([^"]+)"', text)
    assert len(alternatives) >= 6
    assert "ALiBi goes from 50.0 at 128 to 48.0 at 2,048" in alternatives[0]
    assert any("over all heads: ALiBi from 30 to 90 tokens" in text for text in alternatives)


def test_unchanged_pictures_are_not_drawn_again(demo):
    runs, out, _ = demo
    before = (out / "headline.png").stat().st_mtime_ns
    write_report(collect([runs]), out)
    assert (out / "headline.png").stat().st_mtime_ns == before


def test_ticks_are_round_numbers():
    assert round_ticks(67, 110) == [70, 80, 90, 100, 110, 120]
    assert round_ticks(18, 400) == [20, 50, 100, 200]
    assert round_ticks(4.0, 4.3) == pytest.approx([4.0, 4.1, 4.2, 4.3])


def test_the_table_for_the_terminal(demo):
    runs, _, _ = demo
    table = headline_table(collect([runs]))
    assert table is not None
    assert [column.header for column in table.columns] == [
        "trained at 128, evaluated at",
        "ALiBi",
        "T5 bias",
        "Rotary",
        "Sinusoidal",
    ]
    assert list(table.columns[1].cells)[-1] == "48.00"


def hostile_report(root):
    """Two runs of one method, so that their names are shown, and a sample that would like to be a script."""
    name = HOSTILE.replace("/", "")
    for seed in (1, 2):
        folder = make_run(root / "runs", "alibi", {128: 50.0, 256: 49.0}, name=f"{seed}{name}", seed=1)
        (folder / "config.json").write_text(
            (folder / "config.json").read_text().replace('"weight_decay": 0.1', f'"weight_decay": 0.{seed}')
        )
        evaluation = next((folder / "eval").glob("*.json"))
        values = json.loads(evaluation.read_text())
        values["corpus"]["name"] = "</script><script>alert(2)</script>"
        write_with_checksum(evaluation, values)
        evil = "</div><script>alert('written')</script>"
        passages = [{"end": 128, "given": evil, "written": [[evil, 2.5]]}]
        (folder / "samples").mkdir()
        write_with_checksum(folder / "samples" / "sample.json", {"format": 2, "trained_at": 128, "passages": passages})
    return write_report(collect([root / "runs"]), root / "report")


def test_hostile_names_and_texts_inject_nothing(tmp_path):
    page = hostile_report(tmp_path)
    text = page.read_text(encoding="utf-8")
    found = Page(text)
    assert len(found.scripts) == 2
    assert not found.handlers
    assert all(re.fullmatch(r"[\w.-]+\.(png|svg)|data/[\w.-]+\.json", link) for link in found.links + found.images)
    assert "alert(1)" in text  # shown, as text
    assert "<script>alert" not in text
    names = [f"{seed}{HOSTILE.replace('/', '')}" for seed in (1, 2)]
    assert all(name in found.shown for name in names)  # to the letter: {{7*7}} is still {{7*7}}
    markdown = (page.parent / "report.md").read_text()
    assert all(name in re.sub(r"\\(.)", r"\1", markdown) for name in names)
    assert "<script>alert" not in markdown
    assert not re.search(r"(?<!\\)<img", markdown)


def test_own_runs_make_a_report_without_the_papers_tables(tmp_path):
    folder = make_run(tmp_path / "runs", "alibi", {128: 50.0, 256: 49.0}, name="mine")
    config = json.loads((folder / "config.json").read_text())
    config["optim"]["lr"] = 0.5
    (folder / "config.json").write_text(json.dumps(config))
    text = write_report(collect([folder]), tmp_path / "report").read_text(encoding="utf-8")
    assert "Trained on 128 tokens at a time" in text
    assert 'id="tables"' not in text


def test_nothing_to_report_is_told(tmp_path, monkeypatch):
    nothing = rf"There is nothing to report: no results in {tmp_path}\. Make some by `trainshort reproduce"
    with pytest.raises(InputError, match=nothing):
        Report((tmp_path,), tmp_path / "out").run()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"There is nothing to report: no results in this folder\. Make some"):
        Report((Path(),), tmp_path / "out").run()
    with pytest.raises(InputError, match=r"There is nothing to report: no folder was given\."):
        Report(()).run()
    with pytest.raises(InputError, match="There is no folder"):
        Report((tmp_path / "nowhere",)).run()
    make_run(tmp_path / "runs", "alibi", {128: 50.0, 256: 49.0})
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file, and a folder was expected there"):
        Report((tmp_path / "runs",), tmp_path / "file").run()


def test_a_run_whose_config_is_a_link_to_nothing_is_not_left_out(tmp_path):
    for name in ("whole", "broken"):
        make_run(tmp_path / "runs", "alibi", {128: 50.0, 256: 49.0}, name=name)
    config = tmp_path / "runs" / "broken" / "config.json"
    for target in ("nowhere", "config.json"):
        config.unlink()
        config.symlink_to(target)
        with pytest.raises(InputError, match=f"{config}: it is not a regular file"):
            Report((tmp_path / "runs",), tmp_path / "out").run()


@pytest.mark.parametrize(
    "content", ["", "null", '{"result": {"rows": []}, "format": 2}', '{"trained_at": 1e999}', "{}"]
)
@pytest.mark.parametrize("file", ["analysis/reach.json", "samples/sample.json"])
def test_a_damaged_result_beside_the_evaluations_is_told_and_not_left_out(tmp_path, file, content):
    folder = make_run(tmp_path / "runs", "alibi", {128: 50.0, 256: 49.0})
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(content)
    with pytest.raises(InputError, match=rf"{file}.* Remove it"):
        Report((tmp_path / "runs",), tmp_path / "out").run()


def browse(page, *options: str) -> subprocess.CompletedProcess:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no chromium here")
    quiet = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
    more = ("--disable-sync", "--no-first-run", "--virtual-time-budget=20000", "--enable-logging=stderr")
    command = [browser, "--headless", *quiet, *more, f"--user-data-dir={page.parent / 'profile'}", *options]
    return subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_browser_draws_it_without_an_error(demo):
    _, out, _ = demo
    done = browse(out / "index.html", "--dump-dom")
    assert "CONSOLE" not in done.stderr, done.stderr
    headline = done.stdout[done.stdout.index('id="plot-headline"') :]
    headline = headline[: headline.index("</figure>")]
    assert len(re.findall(r'class="trace scatter', headline)) == 4 * 2 + 4  # a band, a line, and the paper's
    assert len(re.findall(r'class="plot[^"]*js-plotly-plot', done.stdout)) == len(re.findall(r'id="plot-', done.stdout))


def test_a_browser_runs_nothing_hostile(tmp_path):
    done = browse(hostile_report(tmp_path), "--dump-dom")
    assert "CONSOLE" not in done.stderr, done.stderr
    drawn = Page(done.stdout)
    assert not drawn.handlers
    assert all(re.fullmatch(r"[\w.-]+\.(png|svg)", image) for image in drawn.images)


def test_loss_by_position_has_enough_predictions_and_concludes_only_what_they_bear_out():
    """The demo's text makes 8 inputs of 2,048 tokens, so single positions have 8 predictions each: noise."""
    rng = np.random.default_rng(0)
    windows = Passes(16_384, 2048, 2048)
    same = pool_bins(summarize(windows, rng.normal(4, 2.5, 16_384)))
    assert min(one.count for one in same) >= 200
    assert sum(one.count for one in same) == 16_384
    assert [one.end for one in same][:-1] == [one.first for one in same][1:]
    assert describe_change_past_training(same, 128).startswith("shows no change (")
    assert describe_change_past_training(same[:1], 10**6) == "was not evaluated past the training length"
    assert describe_change_past_training(same[-1:], 1) == "has too few predictions before the training length"
    for one in same:
        assert one.error == pytest.approx(2.5 / one.count**0.5, rel=0.25)
    worse = rng.normal(4, 2.5, 16_384) + np.where(windows.positions() >= 128, 0.6, 0.0)
    assert describe_change_past_training(pool_bins(summarize(windows, worse)), 128).startswith("rises by 0.")
    better = rng.normal(4, 2.5, 16_384) - np.where(windows.positions() >= 128, 0.6, 0.0)
    assert describe_change_past_training(pool_bins(summarize(windows, better)), 128).startswith("falls by 0.")


def test_no_backticks_are_shown(demo):
    _, out, text = demo
    assert not any("`" in shown for shown in Page(text).shown)
    assert "<code>--only " in text
    assert "(`--only" in (out / "report.md").read_text()


def test_runs_that_were_read_on_different_texts_are_not_drawn_together(tmp_path):
    make_run(tmp_path, "alibi", {128: 50.0, 256: 49.0})
    make_run(tmp_path, "rotary", {128: 51.0, 256: 60.0})
    other = make_run(tmp_path, "sinusoidal", {128: 20.0, 256: 90.0})
    path = next((other / "eval").glob("*.json"))
    save(evaluation := load(path).model_copy(update={"corpus": {**load(path).corpus, "sha256": "another text"}}), path)
    headline = find_headline(collect([tmp_path]))
    assert headline is not None
    assert [line.name for line in headline.lines] == ["ALiBi", "Rotary"]
    assert evaluation.corpus["tokens"] == 32_768  # as many tokens, but not the same


def printed(page: Path) -> list[bytes]:
    """The page as Chromium prints it: what is drawn on each sheet."""
    file = page.with_suffix(".pdf")
    browse(page, f"--print-to-pdf={file}", "--no-pdf-header-footer")
    streams = re.findall(rb"/FlateDecode.*?stream\r?\n(.*?)\r?\nendstream", file.read_bytes(), re.DOTALL)
    drawn = [zlib.decompressobj().decompress(stream) for stream in streams]
    return [stream for stream in drawn if b" Tf" in stream]  # those that write something, fonts and pictures left out


@pytest.mark.slow
def test_a_browser_prints_what_is_closed_on_the_screen(demo, tmp_path):
    _, _, text = demo
    assert text.count("<details>") >= 3
    for name, changed in (("closed", text), ("open", text.replace("<details>", "<details open>"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text(changed, encoding="utf-8")
    closed, opened = (printed(tmp_path / name / "index.html") for name in ("closed", "open"))
    assert len(closed) > 3
    assert [len(sheet) for sheet in closed] == [len(sheet) for sheet in opened]


def test_two_runs_of_one_method_are_told_apart(tmp_path):
    """In every figure by a colour of their own, and not as models that differ in their positions only."""
    for name, steps in (("mine", 10), ("longer", 20)):
        folder = make_run(tmp_path, "alibi", {128: 50.0, 256: 49.0}, name=name)
        config = load_config(folder / "config.json").replace(train={"steps": steps})
        (folder / "config.json").write_text(config.model_dump_json())
    make_run(tmp_path, "rotary", {128: 51.0, 256: 60.0})
    collection = collect([tmp_path])
    headline = find_headline(collection)
    assert headline is not None
    shades = {line.name: line.shade for line in headline.lines}
    assert len(set(shades.values())) == 3
    reach = reach_figure(headline, collection)
    assert reach is not None
    assert {one.name: one.color for one in reach.series if not one.is_reference} == shades
    assert introduction(headline).startswith(
        "3 small language models (longer, mine, Rotary), learned from pieces of 128"
    )


def test_two_folders_of_one_name_are_two_runs(tmp_path):
    for place, lr, last in (("mine", 0.001, 49.0), ("theirs", 0.004, 60.0)):
        folder = make_run(tmp_path / place, "alibi", {128: 50.0, 256: last}, name="run")
        config = load_config(folder / "config.json").replace(optim={"lr": lr})
        (folder / "config.json").write_text(config.model_dump_json())
    headline = find_headline(collect([tmp_path / "mine", tmp_path / "theirs"]))
    assert headline is not None
    assert sorted(line.points[256] for line in headline.lines) == pytest.approx([49.0, 60.0])


def test_a_longer_model_whose_loss_was_not_finite_is_no_point_of_the_headline(tmp_path):
    make_run(tmp_path, "alibi", {128: 50.0, 256: 49.0})
    folder = make_run(tmp_path, "sinusoidal", {768: 47.0}, length=3072)
    path = next((folder / "eval").glob("*.json"))
    evaluation = load(path)
    save(evaluation.with_row(evaluation.rows[0].replace(status="not finite")), path)
    headline = find_headline(collect([tmp_path]))
    assert headline is not None
    assert headline.beyond == ()
