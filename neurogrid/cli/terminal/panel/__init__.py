"""What a command that serves shows on a terminal: a panel that is drawn again when something has changed.

`view` is the panel as plain data, and how it is drawn; `coordinator` and `worker` make one of what is known; `live`
keeps it at the bottom of the terminal.
"""
