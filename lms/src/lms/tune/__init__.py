"""`lms tune`: a search over a script's parameters, by Optuna; each trial is a fresh process under a limit."""
