"""The one exception a person may meet: one line that says what was wrong, what was expected, what to do.

The command line prints it and exits with code 2; a notebook shows it as an ordinary exception.
"""


class UserError(ValueError):
    """Bad input from a person: a file, a config, an argument. The message is one line."""
