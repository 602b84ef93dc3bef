"""`jetwake doctor`: is this machine, its packages and the broker what the product needs, and what mends it where not."""
