"""Every error a user can cause. The command line prints the one line and exits with 2.

DaliError
    ModelFileError      the file is missing, cut off, not a GGUF, or contradicts itself
        UnsupportedError    a known thing that this version does not run (type, architecture)
    InputError          a wrong flag, prompt, or parameter
    NumericError        NaN or infinity where a number was expected
    MemoryBudgetError   the work does not fit the memory it may use
    ConvertError        a checkpoint that cannot be converted
"""


class DaliError(Exception):
    """One line that names the thing, what was found, what was expected, and what to do."""


class ModelFileError(DaliError):
    pass


class UnsupportedError(ModelFileError):
    pass


class InputError(DaliError):
    pass


class NumericError(DaliError):
    pass


class MemoryBudgetError(DaliError):
    pass


class ConvertError(DaliError):
    pass
