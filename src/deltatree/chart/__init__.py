"""One picture of one or more bench runs. Reads records, nothing else."""

from deltatree.chart.draw import draw_chart

__all__ = ["draw_chart"]
