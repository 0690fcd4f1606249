"""The interactive simulator: the Python that runs behind `/simulator`, in a process or in a browser."""
