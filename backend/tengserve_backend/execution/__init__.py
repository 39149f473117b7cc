"""Running a step: model loading, packed batches, attention over pages, sampling."""
