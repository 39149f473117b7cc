"""Makes the process of a script that computes like a server's; imported before anything that imports torch."""

from tengserve_backend.process import prepare

prepare()
