"""`jetwake chaos`: a live system under load, faults at random, and a ledger of what became of every request."""
