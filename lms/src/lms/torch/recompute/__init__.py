"""Modules whose forward runs again in the backward, under torch.utils.checkpoint, so that they save less."""
