"""What a user can mend."""


class UserError(ValueError):
    """Bad input, or a machine that is too small: the message says what, where and what to do.

    Commands print it as one line (command_line.run). Any other exception is a fault of this program, and
    keeps its traceback.
    """
