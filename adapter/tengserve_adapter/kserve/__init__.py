"""The KServe side: the model class, its repository, and the names of the KServe package that we use."""
