"""What can go wrong, in words for the person at the command line."""


class BundleError(Exception):
    """Something could not be done. The message says what was asked, what was found, what to do."""
