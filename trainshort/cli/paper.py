"""`trainshort demo`, `reproduce` and `report`: reproduce the tables and figures of the paper at a chosen scale."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from trainshort.cli.parser import Arg
from trainshort.config.position_config import methods as known_methods
from trainshort.errors import InputError
from trainshort.utils.io import check_folder_writable, make_folder
from trainshort.utils.optional import require_package
from trainshort.utils.registry import did_you_mean
from trainshort.utils.terminal import new_console, print_line

if TYPE_CHECKING:
    from trainshort.experiments.experiments import Experiment

LAUNCHERS = ("local", "slurm")

# The largest number of seeds per model.
MAX_SEEDS = 9


@dataclass(frozen=True)
class Reproduce:
    """Train and evaluate the models of the tables and figures of the paper, and write the report

    Finished work is kept. If the command is interrupted, run it again to continue.

    Examples:
      trainshort reproduce --only demo
      trainshort reproduce --scale laptop --only table5,fig1
      trainshort reproduce --scale laptop --only table6 --seeds 3
      trainshort reproduce --only table2 --methods alibi,rotary,none
      trainshort reproduce --scale paper --plan
      trainshort reproduce --scale gpu --only table2 --launcher slurm --site site.toml
    """

    scale: str = "laptop"
    """Choose the size: laptop (two cores, minutes), gpu (one GPU, hours) or paper (8 to 128 GPUs, days)"""
    only: Annotated[tuple[str, ...], Arg(comma_separated=True)] = ()
    """Reproduce only these tables and figures, such as demo,table5,fig1 (default: all)"""
    methods: Annotated[tuple[str, ...], Arg(comma_separated=True)] = ()
    """Compare these position methods instead of the methods of the paper, such as alibi,mine"""
    seeds: int = 1
    """Train every model with this many seeds; the report then shows mean and spread"""
    launcher: str = "local"
    """Run on this machine (local), or submit one job per model (slurm)"""
    site: Path | None = None
    """Read the resources of Slurm jobs from this TOML file: partition, account, qos, gpus, cores, memory, minutes,
    setup, options"""
    jobs: int | None = None
    """Train this many models at a time on this machine (default: one per core, or one on a GPU)"""
    plan: bool = False
    """Show only the required commands, GPUs, memory, tokens and hours"""
    out: Path | None = None
    """Write the runs to this folder (default: runs/<scale>)"""
    report: Path | None = None
    """Write the report to this folder (default: report/<scale>)"""

    def run(self) -> None:
        """Train and evaluate all models, and write the report. With `--plan`, only print the required resources."""
        from trainshort.experiments.reproduce.slurm import make_executor, read_slurm_config
        from trainshort.experiments.scales import scales

        scale = scales.get(self.scale)
        experiments = self._choose_experiments()
        self._check_options()
        site = read_slurm_config(self.site, scale.gpus) if self.launcher == "slurm" else None
        runs_folder = self.out or Path("runs") / scale.name
        report_folder = self.report or Path("report") / scale.name

        if self.plan:
            from trainshort.experiments.reproduce.plan import format_plan, make_plan

            plan = make_plan(experiments, scale, runs_folder, self.seeds)
            print_line(format_plan(plan, scale))
            return

        # Training takes minutes to days, so missing packages are reported before the training starts.
        require_report_packages()
        from trainshort.experiments.reproduce.jobs import plan_jobs, reproduce

        seeds = range(1, self.seeds + 1)
        job_plan = plan_jobs(experiments, scale, seeds)
        if scale.name == "paper" and site is None:
            raise InputError("The scale 'paper' needs several machines. See --plan for the commands to start.")
        if site is not None:
            make_executor(runs_folder, site)  # A missing Slurm is reported before a folder is created.
        # Both folders are checked before one of them is created.
        check_folder_writable(runs_folder)
        make_folder(report_folder, hint="Choose another --report.")
        make_folder(runs_folder)
        reproduce(job_plan, runs_folder, jobs=self.jobs, site=site, console=new_console())
        write_and_summarize_report(runs_folder, report_folder)

    def _choose_experiments(self) -> "list[Experiment]":
        """Return the experiments that `--only` names, with the position methods that `--methods` names.

        Without `--only`, all experiments are chosen. Without `--methods`, each experiment has its own position methods.
        """
        from trainshort.experiments.experiments import select_experiments, select_methods

        experiments = select_experiments(self.only)
        for name in self.methods:
            known_methods.get(name)  # Raises InputError if the method is unknown.
        if self.methods:
            # An experiment about a single method is an error if the user named it, and is left out otherwise.
            has_named_experiments = bool(self.only)
            experiments = select_methods(experiments, list(self.methods), named=has_named_experiments)
        return experiments

    def _check_options(self) -> None:
        """Raise `InputError` for options with invalid values and for options that cannot be combined."""
        if self.launcher not in LAUNCHERS:
            suggestion = did_you_mean(self.launcher, LAUNCHERS)
            raise InputError(f"Unknown launcher '{self.launcher}'.{suggestion} Known: {', '.join(LAUNCHERS)}.")
        if self.site is not None and self.launcher == "local":
            raise InputError("--site requires --launcher slurm.")
        if not 1 <= self.seeds <= MAX_SEEDS:
            raise InputError(f"--seeds must be from 1 to {MAX_SEEDS}, got {self.seeds}.")
        if self.jobs is not None:
            if self.launcher != "local":
                raise InputError("--jobs requires --launcher local.")
            if self.jobs < 1:
                raise InputError(f"--jobs must be at least 1, got {self.jobs}.")


def require_report_packages() -> None:
    """Check that all packages that draw and write a report are installed.

    Raises:
        InputError: If a package is missing. The message says how to install the package.
    """
    for package in ("jinja2", "matplotlib", "plotly"):
        require_package(package, "Writing a report", "trainshort[report]")


def write_and_summarize_report(runs_folder: Path, report_folder: Path) -> None:
    """Write the report on all runs in a folder, and print its main table and its path.

    Args:
        runs_folder: The folder that contains the run folders.
        report_folder: The folder for the report.
    """
    from trainshort.experiments.claims.collection import collect
    from trainshort.report.write import headline_table, write_report

    collection = collect([runs_folder])  # The results of all runs in the folder.
    report_path = write_report(collection, report_folder)
    table = headline_table(collection)
    if table:
        print_line("Perplexity by position method:")
        new_console().print(table)
    print_line(f"Report: {report_path}")


@dataclass(frozen=True)
class Demo:
    """Train and compare four position methods in about ten minutes, and write the report

    The models are trained at 128 tokens and evaluated at up to 2,048 tokens. One more model is trained at 768 tokens.
    The command is equivalent to `trainshort reproduce --scale laptop --only demo`. If the command is interrupted, run
    it again to continue.

    Examples:
      trainshort demo
      trainshort demo --methods alibi,none
      trainshort demo --out /tmp/runs --report /tmp/report
    """

    methods: Annotated[tuple[str, ...], Arg(comma_separated=True)] = ()
    """Compare these position methods instead of the four of the paper, such as alibi,none"""
    out: Path | None = None
    """Write the runs to this folder (default: runs/laptop)"""
    report: Path | None = None
    """Write the report to this folder (default: report/laptop)"""

    def run(self) -> None:
        """Run the command `reproduce` with the experiment "demo"."""
        Reproduce(only=("demo",), methods=self.methods, out=self.out, report=self.report).run()


@dataclass(frozen=True)
class Report:
    """Write index.html, report.md and the figures from stored results

    Examples:
      trainshort report runs/laptop
      trainshort report runs/mine runs/theirs --out report/comparison
    """

    runs: Annotated[tuple[Path, ...], Arg(metavar="RUN", positional=True)]
    """Read the results of these run folders, or of all run folders inside these folders"""
    out: Path = Path("report")
    """Write the report to this folder"""

    def run(self) -> None:
        """Write the report and print its path."""
        require_report_packages()
        from trainshort.experiments.claims.collection import collect
        from trainshort.report.write import write_report

        collection = collect(self.runs)
        report_path = write_report(collection, self.out)
        print_line(f"Report: {report_path}")
