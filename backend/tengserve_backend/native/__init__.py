"""Our C++ operators for the CPU: their sources, how they are built and how they are called."""
