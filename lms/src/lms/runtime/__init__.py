"""A training as it runs, whatever the framework: its passes recorded, planned and judged."""
