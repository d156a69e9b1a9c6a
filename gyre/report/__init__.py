"""report.html: what a run did, in one file that opens offline."""

from gyre.report.data import ReportError
from gyre.report.page import write_close_up, write_report

__all__ = ["ReportError", "write_close_up", "write_report"]
