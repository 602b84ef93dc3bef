"""What is said on the wire: messages, subjects, streams, errors and names. Pure: nothing here does I/O."""
