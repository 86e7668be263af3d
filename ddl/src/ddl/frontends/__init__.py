"""What scripts of other frameworks see of ddl."""
