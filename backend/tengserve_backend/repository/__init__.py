"""The model repository: config.pbtxt, settings, version folders, weights."""
