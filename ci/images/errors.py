"""The errors that a user of `make image` sees."""


class ImageError(Exception):
    """An image could not be made: what was asked, what was found, what to do."""
