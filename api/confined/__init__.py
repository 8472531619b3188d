"""Children that touch what was sent: capped in memory, time and what they can reach."""
