"""report.html: what a run did, in one file that opens offline."""

from gyre.report.page import write_report

__all__ = ["write_report"]
