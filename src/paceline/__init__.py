"""paceline trains one model on many devices: it plans the run, measures the machine, trains and explains it."""

__version__ = "0.1.0"
