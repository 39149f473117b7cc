"""tengserve on the KServe model server: dialects, HTTP, the command line. It knows no torch."""
