"""`lms sweep`: a user's script plain and under several limits, memory against time."""
