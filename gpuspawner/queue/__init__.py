"""The queue: tickets, the scheduler, estimates and replays."""
