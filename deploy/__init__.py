"""Putting it together and running it: composition, the command line, the local system, the embedded broker."""
