"""The parts of ddl that scripts of other frameworks use."""
