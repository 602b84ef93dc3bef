"""What a fleet is asked to carry, and what that takes: workloads for benches and replays."""
