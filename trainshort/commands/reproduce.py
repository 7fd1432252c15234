"""`trainshort reproduce`: the paper's tables and figures, at a scale one can afford."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

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
    only: str = ""
    """Tables and figures by name, such as demo,table5,fig1. Default: all."""
    methods: str = ""
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
        from rich.console import Console

        from trainshort.errors import InputError
        from trainshort.files import make_folder
        from trainshort.methods import methods as known
        from trainshort.recipes.experiments import choose, choose_methods
        from trainshort.recipes.scales import scales
        from trainshort.registry import did_you_mean
        from trainshort.reproduce.cluster import read_site

        scale = scales.get(self.scale)
        chosen = choose(self.only.split(","))
        if methods := [name.strip() for name in self.methods.split(",") if name.strip()]:
            for name in methods:
                known.get(name)  # an unknown one is told before anything is computed
            chosen = choose_methods(chosen, methods, named=bool(self.only.strip()))
        if self.launcher not in LAUNCHERS:
            hint = did_you_mean(self.launcher, LAUNCHERS)
            raise InputError(f"Unknown launcher '{self.launcher}'.{hint} Known: {', '.join(LAUNCHERS)}.")
        if self.site is not None and self.launcher == "local":
            raise InputError("--site says what a Slurm job asks for; give --launcher slurm with it.")
        site = read_site(self.site, scale.gpus)
        if not 1 <= self.seeds <= 9:
            raise InputError(f"--seeds is a number from 1 to 9, got {self.seeds}.")
        if self.jobs is not None and (self.jobs < 1 or self.launcher != "local"):
            raise InputError("--jobs is the number of models at a time on this machine: at least 1, and not for slurm.")
        root, page = self.out or Path("runs") / scale.name, self.report or Path("report") / scale.name
        if self.plan:
            from trainshort.reproduce.plan import make_plan, told

            print(told(make_plan(chosen, scale, root, self.seeds), scale))
            return
        from trainshort.reproduce.runner import reproduce
        from trainshort.reproduce.tasks import assign

        assignment = assign(chosen, scale, range(1, self.seeds + 1))
        if scale.name == "paper" and self.launcher == "local":
            raise InputError("The paper's scale does not run on one machine. See --plan for the commands to start.")
        make_folder(root)
        make_folder(page, mend="Choose another --report.")
        console = Console()
        reproduce(assignment, root, launcher=self.launcher, jobs=self.jobs, site=site, console=console)
        finish(root, page, console)


def finish(root: Path, out: Path, console: "Console") -> None:
    """The report, the table of the headline, and where to look."""
    from trainshort.claims.collection import collect
    from trainshort.report.writing import headline_table, write_report

    collection = collect([root])
    page = write_report(collection, out)
    if table := headline_table(collection):
        console.print("Perplexity by position method:", highlight=False)
        console.print(table)
    console.print(f"Report: {page}", highlight=False, soft_wrap=True)
