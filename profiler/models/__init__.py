"""The models that are named instead of written: their modules, losses and samples."""
