"""Tables, pictures and pages about runs, and what the terminal shows while one goes on."""

from fedstrata.report.console import RunProgress, summary_panel
from fedstrata.report.html import write_comparison, write_report
from fedstrata.report.plots import plot_curves, plot_run
from fedstrata.report.tables import compare_table, to_json, to_markdown, to_rich

__all__ = [
    "RunProgress",
    "compare_table",
    "plot_curves",
    "plot_run",
    "summary_panel",
    "to_json",
    "to_markdown",
    "to_rich",
    "write_comparison",
    "write_report",
]
