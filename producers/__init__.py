"""Those who put work on the queues: the client, and the router that gives each request to a worker."""
