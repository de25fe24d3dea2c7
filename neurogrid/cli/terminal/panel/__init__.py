"""The panel of a command that serves, on a terminal: drawn again when something has changed.

`view` is the panel as plain data, and how it is drawn; `coordinator` and `worker` make one of what is known; `live`
keeps it at the bottom of the terminal.
"""
