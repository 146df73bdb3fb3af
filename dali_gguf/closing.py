"""Closing several things of which each may fail."""

from collections.abc import Callable


def close_all(*closings: Callable[[], None]) -> None:
    """Calls every one of them, in order; then raises the first error there was."""
    errors = []
    for close in closings:
        try:
            close()
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]
