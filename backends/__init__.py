"""Backends: one file or folder for each family of devices. They know `hal` and nothing above it."""
