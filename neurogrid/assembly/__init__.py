"""A coordinator and a worker put together: settings, and `open_*`."""
