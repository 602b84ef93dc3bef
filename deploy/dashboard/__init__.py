"""The live page: what a broker tells of its pipeline, drawn for people."""
