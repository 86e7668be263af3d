"""What front ends share: calls matched by name, process sets, joining, objects, buckets. No framework is imported."""
