"""The figures of the original experiment, each of them one command: `python -m loadtest.experiments NAME`."""
