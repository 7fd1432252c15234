"""`trainshort demo`, `reproduce` and `report`: the paper's tables and figures, at a scale one can afford."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from trainshort.cli.parser import Arg
from trainshort.config.position_config import methods as known
from trainshort.errors import InputError
from trainshort.utils.io import check_folder_writable, make_folder
from trainshort.utils.optional import require_package
from trainshort.utils.registry import did_you_mean
from trainshort.utils.terminal import new_console, print_line

LAUNCHERS = ("local", "slurm")


@dataclass(frozen=True)
class Reproduce:
    """Train and evaluate what the paper's tables and figures need; then write the report.

    What is done is kept: the same command goes on after a kill, and computes nothing twice.

    Examples:
      trainshort reproduce --only demo
      trainshort reproduce --scale laptop --only table5,fig1
      trainshort reproduce --scale laptop --only table6 --seeds 3
      trainshort reproduce --only table2 --methods alibi,rotary,none
      trainshort reproduce --scale paper --plan
      trainshort reproduce --scale gpu --only table2 --launcher slurm --site site.toml
    """

    scale: str = "laptop"
    """laptop (two cores, minutes), gpu (one GPU, hours) or paper (8 to 128 GPUs, days)."""
    only: Annotated[tuple[str, ...], Arg(names=True)] = ()
    """Tables and figures by name, such as demo,table5,fig1. Default: all."""
    methods: Annotated[tuple[str, ...], Arg(names=True)] = ()
    """Position methods in place of the paper's, such as alibi,mine: in the demo and in tables that compare some."""
    seeds: int = 1
    """Train every model with so many seeds; the report gives mean and spread."""
    launcher: str = "local"
    """local: on this machine; slurm: one job per model, through submitit."""
    site: Path | None = None
    """TOML file of what a Slurm job asks for: partition, account, qos, gpus, cores, memory, minutes, setup, options."""
    jobs: int | None = None
    """Models at a time on this machine, each with its share of the cores. Default: one per core, with a GPU one."""
    plan: bool = False
    """Only say what it would take: commands, GPUs, memory, tokens, hours."""
    out: Path | None = None
    """Folder of the runs. Default: runs/<scale>."""
    report: Path | None = None
    """Folder of the report. Default: report/<scale>."""

    def run(self) -> None:
        from trainshort.experiments.experiments import select_experiments, select_methods
        from trainshort.experiments.reproduce.slurm import make_executor, read_slurm_config
        from trainshort.experiments.scales import scales

        scale = scales.get(self.scale)
        chosen = select_experiments(self.only)
        for name in self.methods:
            known.get(name)
        if self.methods:
            chosen = select_methods(chosen, list(self.methods), named=bool(self.only))
        if self.launcher not in LAUNCHERS:
            hint = did_you_mean(self.launcher, LAUNCHERS)
            raise InputError(f"Unknown launcher '{self.launcher}'.{hint} Known: {', '.join(LAUNCHERS)}.")
        if self.site is not None and self.launcher == "local":
            raise InputError("--site says what a Slurm job asks for; give --launcher slurm with it.")
        site = read_slurm_config(self.site, scale.gpus) if self.launcher == "slurm" else None
        if not 1 <= self.seeds <= 9:
            raise InputError(f"--seeds is a number from 1 to 9, got {self.seeds}.")
        if self.jobs is not None and (self.jobs < 1 or self.launcher != "local"):
            raise InputError("--jobs is the number of models at a time on this machine: at least 1, and not for slurm.")
        root, page = self.out or Path("runs") / scale.name, self.report or Path("report") / scale.name
        if self.plan:
            from trainshort.experiments.reproduce.plan import format_plan, make_plan

            print_line(format_plan(make_plan(chosen, scale, root, self.seeds), scale))
            return
        # Training takes minutes to days, so missing packages are reported before the training starts.
        require_report_packages()
        from trainshort.experiments.reproduce.jobs import plan_jobs, reproduce

        assignment = plan_jobs(chosen, scale, range(1, self.seeds + 1))
        if scale.name == "paper" and site is None:
            raise InputError("The paper's scale does not run on one machine. See --plan for the commands to start.")
        if site is not None:
            make_executor(root, site)  # that there is none is told before a folder is made
        check_folder_writable(root)  # both, before either is made
        make_folder(page, hint="Choose another --report.")
        make_folder(root)
        reproduce(assignment, root, jobs=self.jobs, site=site, console=new_console())
        finish(root, page)


def require_report_packages() -> None:
    """Check that all packages that draw and write a report are installed.

    Raises:
        InputError: If a package is missing. The message says how to install the package.
    """
    for package in ("jinja2", "matplotlib", "plotly"):
        require_package(package, "Writing a report", "trainshort[report]")


def finish(root: Path, out: Path) -> None:
    """The report, the table of the headline, and where to look."""
    from trainshort.experiments.claims.collection import collect
    from trainshort.report.write import headline_table, write_report

    collection = collect([root])
    page = write_report(collection, out)
    if table := headline_table(collection):
        print_line("Perplexity by position method:")
        new_console().print(table)
    print_line(f"Report: {page}")


@dataclass(frozen=True)
class Demo:
    """Train four position methods at 128 tokens, evaluate them at up to 2,048, and one at 768; then write the report.

    The same as `trainshort reproduce --scale laptop --only demo`: about ten minutes on two cores the first time,
    seconds after that. Stopped in the middle, the same command goes on.

    Examples:
      trainshort demo
      trainshort demo --methods alibi,none
      trainshort demo --out /tmp/runs --report /tmp/report
    """

    methods: Annotated[tuple[str, ...], Arg(names=True)] = ()
    """Position methods in place of the paper's four, such as alibi,none or your own."""
    out: Path | None = None
    """Folder of the runs. Default: runs/laptop."""
    report: Path | None = None
    """Folder of the report. Default: report/laptop."""

    def run(self) -> None:
        Reproduce(only=("demo",), methods=self.methods, out=self.out, report=self.report).run()


@dataclass(frozen=True)
class Report:
    """Write index.html, report.md and the figures from run folders. Nothing is computed; only JSON is read.

    Examples:
      trainshort report runs/laptop
      trainshort report runs/mine runs/theirs --out report/comparison
    """

    runs: Annotated[tuple[Path, ...], Arg(metavar="RUN", positional=True)]
    """Run folders, or folders that hold some."""
    out: Path = Path("report")
    """Folder to write."""

    def run(self) -> None:
        require_report_packages()
        from trainshort.experiments.claims.collection import collect
        from trainshort.report.write import write_report

        print_line(f"Report: {write_report(collect(self.runs), self.out)}")
