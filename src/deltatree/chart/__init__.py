"""Pictures of bench runs and of one generation's trace. Reads records, nothing else."""

from deltatree.chart.draw import draw_chart
from deltatree.chart.trace import draw_trace

__all__ = ["draw_chart", "draw_trace"]
