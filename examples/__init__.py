"""Examples that run as they are: `python -m examples.gemma2.train`."""
