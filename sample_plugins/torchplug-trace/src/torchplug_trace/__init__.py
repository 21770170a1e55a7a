"""A line on stderr for every hook call of every torchplug model: which hook, which model, how long, which shapes.

`trace` is what the entry point names: installed, it is attached to every model that is loaded. `make_trace` makes
others, for one model at a time.
"""

from torchplug_trace.tracing import FORM_VARIABLE, make_trace

trace = make_trace()

__all__ = ["FORM_VARIABLE", "make_trace", "trace"]
