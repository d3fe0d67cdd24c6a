"""apptrain's half in the image: from a scheduler's environment to torchrun."""

__version__ = "0.3.0"
