"""Those who take work off the queues and do it: prefill, decode and aggregated workers, and the engines they drive."""
