"""What both engines share: chains of operators, source partitions, outlets, assignment, the clock and signals."""
